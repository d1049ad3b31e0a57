"""A run that is interrupted, saved and resumed ends where an uninterrupted run ends.

python resume.py
python -m ampfuse resume.py
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="float16")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--save", help="where the trained weights go")
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = getattr(torch, options.dtype)


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, gamma=0.5)
        self.scaler = torch.amp.GradScaler(
            device, growth_interval=3, enabled=dtype == torch.float16
        )

    def step(self, number: int) -> float:
        random = torch.Generator().manual_seed(number)
        features = torch.randn(32, 16, generator=random).to(device)
        target = features[:, :4].argmax(1)
        with torch.autocast(device, dtype):
            loss = nn.functional.cross_entropy(self.model(features), target)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item()

    def save(self, path: Path) -> None:
        parts = ("model", "optimizer", "scheduler", "scaler")
        torch.save({part: getattr(self, part).state_dict() for part in parts}, path)

    def load(self, path: Path) -> None:
        for part, state in torch.load(path).items():
            getattr(self, part).load_state_dict(state)


whole = Training()
losses = [whole.step(number) for number in range(options.steps)]
print(f"uninterrupted {losses[-1]:.6f}")

with tempfile.TemporaryDirectory() as folder:
    first = Training()
    for number in range(options.steps // 2):
        first.step(number)
    first.save(Path(folder) / "checkpoint.pt")
    second = Training()
    second.load(Path(folder) / "checkpoint.pt")
for number in range(options.steps // 2, options.steps):
    loss = second.step(number)
print(f"resumed {loss:.6f}")
for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
    assert torch.equal(one, other), "the resumed run ended with other parameters"

if options.save:
    torch.save(second.model.state_dict(), options.save)
