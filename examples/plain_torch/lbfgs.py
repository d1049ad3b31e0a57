"""Training with LBFGS, which evaluates its loss several times per step, without a scaler.

python lbfgs.py
python -m ampfuse lbfgs.py
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--save", help="where the trained weights go")
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = getattr(torch, options.dtype)

features = torch.randn(256, 20, device=device)
target = (features[:, :5] + 0.5 * torch.randn(256, 5, device=device)).argmax(1)
model = nn.Linear(20, 5).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)


def closure() -> torch.Tensor:
    optimizer.zero_grad()
    with torch.autocast(device, dtype):
        loss = criterion(model(features), target)
    loss = loss + 1e-3 * sum(p.square().sum() for p in model.parameters())
    loss.backward()
    return loss


for step in range(options.steps):
    loss = optimizer.step(closure)
    print(f"step {step} loss {loss.item():.4f}")

if options.save:
    torch.save(model.state_dict(), options.save)
