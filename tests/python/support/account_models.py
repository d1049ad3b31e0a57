"""A small model and its training step, for accounts."""

import torch
from ampfuse.memory import account
from torch import nn

ROWS, WIDTH = 4096, 256  # activations are much larger than weights
WEIGHTS = WIDTH * WIDTH + WIDTH  # of each layer
ACTIVATION = ROWS * WIDTH * 4


def two_layers(dtype=torch.float32):
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of_batch(model, autocast=False):
    """Return a function that computes the loss of a batch."""
    batch = torch.randn(ROWS, WIDTH, dtype=next(model.parameters()).dtype)

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(batch).square().mean()

    return loss


def stepper(optimizer, loss_of, *, micro_batches=1):
    """Return a training step whose loss is loss_of()."""

    def step():
        for _ in range(micro_batches):
            loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def accounted(
    model, loss_of=None, *, optimizer=None, device="cpu", autocast=False, micro_batches=1
):
    """Return the account of a training step, by default of SGD with the loss of a batch."""
    optimizer = optimizer or sgd(model)
    loss_of = loss_of or loss_of_batch(model, autocast)
    step = stepper(optimizer, loss_of, micro_batches=micro_batches)
    return account(model, optimizer, step, device=device)
