"""How close `ampfuse.memory.account` is to the peak memory that is measured.

    python benchmarks/account_error.py [--out account.csv]

Six models in four settings. The account is made first, without computing anything. Then the same
step runs, and the most bytes that torch has allocated at a time are measured.
"""

import argparse
import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ampfuse.memory
import torch
from ampfuse.tools.memory.recorder import blocks_of
from harness.memory import extra_peak
from models import GPT2, Size, ViT
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass
class Task:
    """A model, a batch, and the loss of what the model returns for it."""

    model: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy


class Residual(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same size."""
        return functional.relu(images + self.layers(images))


class WithLastLayer(nn.Module):
    """A transformer of models.py, and the logits from its hidden states."""

    def __init__(self, model: GPT2 | ViT) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits."""
        return functional.linear(self.model(inputs), self.model.weight)


class Tagger(nn.Module):
    """An LSTM that classifies each word."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.last = nn.Linear(width, words)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, one row per word."""
        hidden: Tensor = self.last(self.lstm(self.embedding(words))[0])
        return hidden.flatten(0, 1)


def images(count: int, edge: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, edge, edge), torch.randint(classes, (count,))


def words(count: int, length: int, classes: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(classes, (count, length + 1))
    return text[:, :-1], text[:, 1:].flatten()


def gpt2() -> Task:
    size = Size(width=256, depth=4, heads=4, classes=8192, length=128, batch=8)
    return Task(WithLastLayer(GPT2(size)), words(size.batch, size.length, size.classes))


def vit() -> Task:
    size = Size(width=192, depth=12, heads=3, classes=100, length=64, batch=32)
    return Task(WithLastLayer(ViT(size)), images(size.batch, size.length, size.classes))


def cnn() -> Task:
    """Return the network of two convolutions that tutorials train on CIFAR-10."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 10)),
    )
    return Task(model, images(128, 32, 10))


def resnet() -> Task:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1),
        nn.Sequential(*(Residual(64) for _ in range(4))),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return Task(model, images(16, 32, 10))


def lstm() -> Task:
    return Task(Tagger(2000, 256), words(16, 64, 2000))


def regression() -> Task:
    hidden = (
        layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.Tanh(), nn.Dropout(0.1))
    )
    model = nn.Sequential(nn.Linear(32, 512), *hidden, nn.Linear(512, 1))
    return Task(model, (torch.randn(2048, 32), torch.randn(2048, 1)), functional.mse_loss)


MODELS = (gpt2, vit, cnn, resnet, lstm, regression)


@dataclass(frozen=True)
class Setting:
    """How a model is trained."""

    name: str
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    weights: torch.dtype = torch.float32
    has_autocast: bool = False
    has_scaler: bool = False
    has_checkpoints: bool = False


SETTINGS = (
    Setting("float32", lambda model: torch.optim.AdamW(model.parameters())),
    Setting("autocast", lambda model: ampfuse.AdamW(model.parameters()), has_autocast=True),
    Setting(
        "bfloat16 weights",
        lambda model: ampfuse.AdamW(
            model.parameters(), master_weights="remainder", state_dtype=torch.bfloat16
        ),
        weights=torch.bfloat16,
    ),
    Setting(
        "autocast, scaler, checkpoints",
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        has_autocast=True,
        has_scaler=True,
        has_checkpoints=True,
    ),
)


def checkpointed(block: nn.Module) -> None:
    """Make a block compute its activations again in backward."""
    forward = block.forward
    block.forward = lambda *args: checkpoint(forward, *args, use_reentrant=False)


def stepper(task: Task, setting: Setting) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Return an optimizer and a function that makes a training step."""
    task.model.to(setting.weights)
    if setting.has_checkpoints:
        for name in blocks_of(task.model):
            checkpointed(task.model.get_submodule(name))
    optimizer = setting.optimizer(task.model)
    scaler = ampfuse.GradScaler("cpu", enabled=setting.has_scaler)
    inputs, target = (
        part.to(setting.weights) if part.is_floating_point() else part for part in task.batch
    )

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=setting.has_autocast):
            loss = task.loss(task.model(inputs), target)
        scaler.scale(loss).backward()
        if setting.has_scaler:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return optimizer, step


def compare(make: Callable[[], Task], setting: Setting) -> tuple[int, int]:
    """Return the bytes of the account, and those measured."""
    torch.manual_seed(0)
    task = make()
    optimizer, step = stepper(task, setting)
    account = ampfuse.memory.account(task.model, optimizer, step, device="cpu")
    step()
    state = (value for entries in optimizer.state.values() for value in entries.values())
    kept = [*task.model.parameters(), *task.model.buffers(), *task.batch]
    kept += [value for value in state if isinstance(value, Tensor)]
    before = sum(tensor.untyped_storage().nbytes() for tensor in kept)
    return account.peak, before + extra_peak(torch.device("cpu"), step)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="a CSV file to write")
    options = parser.parse_args()
    rows: list[tuple[object, ...]] = [
        ("model", "setting", "account_bytes", "measured_bytes", "error")
    ]
    for make in MODELS:
        for setting in SETTINGS:
            account, measured = compare(make, setting)
            row = (make.__name__, setting.name, account, measured, f"{account / measured - 1:+.4f}")
            rows.append(row)
            print("{:<12}{:<32}{:>12,}{:>14,}{:>9}".format(*row), flush=True)
    if options.out is not None:
        with options.out.open("w", newline="") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
