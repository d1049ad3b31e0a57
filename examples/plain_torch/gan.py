"""Two networks, two optimizers and one scaler: a generator learns to draw points on a circle.

python gan.py
python -m ampfuse gan.py
"""

import argparse

import torch
from torch import nn
from torch.optim import Adam

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="float16")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--save", help="where the trained weights go")
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = getattr(torch, options.dtype)


def network(inputs: int, outputs: int) -> nn.Sequential:
    layers = [nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.Linear(64, outputs)).to(device)


generator, critic = network(4, 2), network(2, 1)
of_generator = Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_critic = Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

for step in range(options.steps):
    angle = 2 * torch.pi * torch.rand(128, 1, device=device)
    real = torch.cat([angle.cos(), angle.sin()], 1)
    ones, zeros = torch.ones(128, 1, device=device), torch.zeros(128, 1, device=device)

    of_critic.zero_grad()
    with torch.autocast(device, dtype):
        fake = generator(torch.randn(128, 4, device=device))
        critic_loss = criterion(critic(real), ones) + criterion(critic(fake.detach()), zeros)
    scaler.scale(critic_loss).backward()
    scaler.step(of_critic)

    of_generator.zero_grad()
    with torch.autocast(device, dtype):
        generator_loss = criterion(critic(fake), ones)
    scaler.scale(generator_loss).backward()
    scaler.step(of_generator)
    scaler.update()
    if step % 20 == 19:
        print(f"step {step} critic {critic_loss.item():.4f} generator {generator_loss.item():.4f}")

if options.save:
    torch.save({"generator": generator.state_dict(), "critic": critic.state_dict()}, options.save)
