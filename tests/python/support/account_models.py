"""A small model and its training step, for accounts."""

import torch
from torch import nn

ROWS, WIDTH = 4096, 256  # activations are much larger than weights
WEIGHTS = WIDTH * WIDTH + WIDTH  # of each layer
ACTIVATION = ROWS * WIDTH * 4


def two_layers(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    return model.to(dtype)


def stepper(model, optimizer, *, autocast=False, sees=None):
    batch = torch.randn(ROWS, WIDTH, dtype=next(model.parameters()).dtype)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        if sees is not None:
            sees.append(loss.item())
        optimizer.zero_grad()

    return step
