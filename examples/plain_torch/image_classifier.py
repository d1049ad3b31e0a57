"""A small convolutional network learns the direction of stripes, with torch's plain amp recipe.

python image_classifier.py
python -m ampfuse image_classifier.py
"""

import argparse

import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="float16")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save", help="where the trained weights go")
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = getattr(torch, options.dtype)

# Stripes in one of eight directions, with noise.
angles = torch.arange(8) * torch.pi / 8
label = torch.randint(8, (512,))
y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
wave = torch.cos(angles[label])[:, None, None] * x + torch.sin(angles[label])[:, None, None] * y
images = torch.sin(wave + torch.rand(512, 1, 1) * 6)[:, None] + 0.3 * torch.randn(512, 1, 16, 16)
batches = DataLoader(TensorDataset(images, label), batch_size=64, shuffle=True)

model = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 5, padding=2),
    nn.ReLU(),
    nn.AdaptiveMaxPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 8),
).to(device)
criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
scaler = GradScaler(device, enabled=dtype == torch.float16)

for epoch in range(options.epochs):
    total, right = 0.0, 0
    for image, target in batches:
        image, target = image.to(device), target.to(device)
        optimizer.zero_grad()
        with torch.autocast(device, dtype):
            logits = model(image)
            loss = criterion(logits, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item() * len(image)
        right += (logits.argmax(1) == target).sum().item()
    scheduler.step()
    print(f"epoch {epoch} loss {total / 512:.4f} accuracy {right / 512:.3f}")

if options.save:
    torch.save(model.state_dict(), options.save)
