"""Programs of which it is known which precision suits them; the first argument names one."""

import sys
import time
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional

STEPS = 100


class Images:
    """Ten classes of images: noise around a picture of each class."""

    def __init__(self, wait=0.0):
        self.pictures = torch.randn(10, 3, 8, 8)
        self.wait = wait

    def __iter__(self):
        for _ in range(STEPS):
            time.sleep(self.wait)
            labels = torch.randint(10, (32,))
            yield self.pictures[labels] + torch.randn(32, *self.pictures.shape[1:]), labels


def convolutions():
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


class Attention(nn.Module):
    """Attention whose scores are products of `size` large numbers."""

    def __init__(self, width, gain):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gain = gain

    def forward(self, x):
        query, key, value = (self.qkv(x) * self.gain).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        return self.out(torch.softmax(scores / self.gain**2, dim=-1) @ value / self.gain)


class SquareNorm(nn.Module):
    """A norm that squares its inputs in their own precision."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


class Block(nn.Module):
    def __init__(self, width, gain):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, gain)
        widen, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(widen, nn.GELU(), narrow)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Language(nn.Module):
    def __init__(self, gain=1.0, width=64, classes=512):
        super().__init__()
        self.tokens = nn.Embedding(classes, width)
        self.blocks = nn.ModuleList(Block(width, gain) for _ in range(2))
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def texts():
    for _ in range(STEPS):
        tokens = torch.randint(0, 512, (8, 33))
        tokens[:, 1::2] = tokens[:, 0:-1:2]
        yield tokens[:, :-1], tokens[:, 1:]


def train(model, batches, loss_of, rate=1e-3, optimizer=torch.optim.AdamW):
    optimizer = optimizer(model.parameters(), lr=rate)
    for inputs, targets in batches:
        optimizer.zero_grad()
        output = model(inputs)
        loss_of(output, targets).backward()
        optimizer.step()


def of_classes(logits, labels):
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Heat(nn.Module):
    """A network, and its second derivative by finite differences, as in a heat equation."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.last = nn.Linear(64, 1)

    def forward(self, x):
        left, middle, right = (self.last(self.body(x + shift)) for shift in (-0.01, 0.0, 0.01))
        return (left - 2 * middle + right) / 0.01**2


def positions():
    x = torch.linspace(0, 1, 256).unsqueeze(1)
    for _ in range(STEPS):
        yield x, torch.sin(6 * x)


class Differences(nn.Module):
    """Learns from small differences of large numbers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        first, second = self.body(x) + 8, self.body(x + 0.1) + 8
        return (first - second) * 10


class Waves(nn.Module):
    """Sines of large multiples of the inputs."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("frequencies", torch.randn(16, width) * 300)

    def forward(self, x):
        return torch.sin(x @ self.frequencies)


def cosines(batch=64):
    for _ in range(STEPS):
        x = torch.randn(batch, 16)
        yield x, x.cos()


class Masked(Language):
    """Masks with a number that float16 does not have."""

    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits.masked_fill(torch.zeros_like(logits, dtype=torch.bool), -1e9)


def with_large_squares():
    model = nn.Sequential(nn.Linear(16, 256), SquareNorm(256), nn.ReLU(), nn.Linear(256, 16))
    nn.init.normal_(model[0].weight, std=200.0)
    return model


def of_waves():
    body = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 16))
    return nn.Sequential(OrderedDict(waves=Waves(512), body=body))


def one_layer():
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))


def tiny(logits, labels):
    return 1e-6 * of_classes(logits, labels)


# The model, the batches and the loss of each program.
PROGRAMS = {
    "convolutions": lambda: (convolutions(), Images(), of_classes),
    "language": lambda: (Language(), texts(), of_classes),
    "attention": lambda: (Language(gain=400.0), texts(), of_classes),
    "norm": lambda: (with_large_squares(), cosines(), functional.mse_loss),
    "mask": lambda: (Masked(), texts(), of_classes),
    "tiny gradients": lambda: (convolutions(), Images(), tiny),
    "stiff": lambda: (Heat(), positions(), functional.mse_loss),
    "differences": lambda: (Differences(), cosines(), functional.mse_loss),
    "waves": lambda: (of_waves(), cosines(512), functional.mse_loss),
    "input": lambda: (one_layer(), Images(wait=0.04), of_classes),
    "diverges": lambda: (convolutions(), Images(), of_classes, 1e20, torch.optim.SGD),
}
torch.manual_seed(0)
train(*PROGRAMS[sys.argv[1]]())
