"""A program with one fault, which the first argument names."""

import sys
import time
from functools import partial

import torch
from ampfuse.tools.diagnosis import advice
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

FAULT = sys.argv[1]
SAMPLES = {"restarts": 8, "transform": 320}.get(FAULT, 640)


def augment(image):
    if FAULT in ("no workers", "transform"):
        time.sleep(0.002 if FAULT == "no workers" else 0.02)
    return image


class Images(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return augment(torch.randn(64)), index % 10


class Model(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, batch):
        return self.last(torch.relu(self.first(batch)))


model = Model(32768 if FAULT == "logits" else 10)
if FAULT == "compilations":
    model = torch.compile(model, dynamic=False, backend="eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", growth_interval=1 if FAULT == "growth" else 2000)
loader = DataLoader(
    Images(),
    4 if FAULT == "restarts" else 16,
    num_workers=2 if FAULT in ("restarts", "transform") else 0,
)
dtype = torch.float16 if FAULT == "growth" else torch.bfloat16
total, kept, step = 0.0, [], 0
item = torch.Tensor.item
if FAULT == "item":
    torch.Tensor.item = partial(time.sleep, 0.03)  # as if it waited for a GPU
    advice.uses_gpu = lambda: True
if FAULT == "anomaly checks":
    torch.autograd.set_detect_anomaly(True)
for _ in range(6 if FAULT == "restarts" else 1):
    for images, labels in loader:
        step += 1
        time.sleep(0.02)
        if FAULT == "compilations":
            size = 16 - step % 13
            images, labels = images[:size], labels[:size]
        with torch.autocast("cpu", dtype):
            logits = model(images)
            if FAULT == "logits":
                logits = logits.float()
            loss = functional.cross_entropy(logits, labels)
        if FAULT == "collapse" and step > 10:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if FAULT == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if FAULT != "kept gradients":
            optimizer.zero_grad()
        if FAULT == "item":
            total += loss.item() or 0.0
        if FAULT == "saving":
            torch.save([torch.zeros(2000, 2000)], "model.pt")
        if FAULT == "leak":
            kept.append(torch.ones(2**18))
torch.Tensor.item = item
