"""Large batches in parts: gradients are accumulated, unscaled once and clipped.

python accumulation.py
python -m ampfuse accumulation.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="float16")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--parts", type=int, default=3)
parser.add_argument("--save", help="where the trained weights go")
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = getattr(torch, options.dtype)

teacher = nn.Linear(32, 10).to(device)
model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device, growth_interval=8, enabled=dtype == torch.float16)

for step in range(options.steps):
    total = 0.0
    for _ in range(options.parts):
        features = torch.randn(48, 32, device=device)
        target = teacher(features).argmax(1)
        with torch.autocast(device, dtype):
            loss = F.cross_entropy(model(features), target) / options.parts
        scaler.scale(loss).backward()
        total += loss.item()
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), max_norm=0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step % 5 == 4:
        print(f"step {step} loss {total:.4f} norm {norm.item():.4f} scale {scaler.get_scale()}")

if options.save:
    torch.save(model.state_dict(), options.save)
