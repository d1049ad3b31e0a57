"""Trains a small classifier on scikit-learn's handwritten digits three times, and compares.

    python examples/digits.py [--epochs 30] [--device cpu] [--out digits.png]

The three runs share one training loop, one seed and one order of batches. `float32` trains without
mixed precision, `torch.amp` with torch's autocast, GradScaler, gradient clipping and AdamW, and
`ampfuse` with its GradScaler, its loss, which folds the scale into the gradient of 16-bit logits
before that is rounded, and its AdamW, which unscales and clips as part of its step: two lines less.
"""
# mypy: disable-error-code="attr-defined, no-untyped-call"
# (torch's GradScaler, backward and split have no types: no reason to clutter the loop)

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ampfuse
import torch
from devices import low_precision, peak_memory, reset_peak_memory
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

SEED = 0
BATCH = 128
HIDDEN = 512
LEARNING_RATE = 2e-3
MAX_GRAD_NORM = 1.0
LEAST_ACCURACY = 0.95


@dataclass(frozen=True)
class Recipe:
    """What differs between the runs."""

    name: str
    mixed: bool
    scaler: Callable[..., GradScaler]
    criterion: Callable[[GradScaler], nn.Module]
    optimizer: Callable[..., torch.optim.Optimizer]
    clips_itself: bool


TORCH: dict[str, Any] = {
    "scaler": GradScaler,
    "criterion": lambda scaler: nn.CrossEntropyLoss(),
    "optimizer": torch.optim.AdamW,
    "clips_itself": False,
}
RECIPES = [
    Recipe("float32", mixed=False, **TORCH),
    Recipe("torch.amp", mixed=True, **TORCH),
    Recipe(
        "ampfuse",
        mixed=True,
        scaler=ampfuse.GradScaler,
        criterion=lambda scaler: ampfuse.CrossEntropyLoss(scaler=scaler),
        optimizer=partial(ampfuse.AdamW, max_grad_norm=MAX_GRAD_NORM),
        clips_itself=True,
    ),
]


@dataclass(frozen=True)
class Digits:
    """8 by 8 images as rows of 64 values in [0, 1], and their labels; a fifth is held out."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, device: torch.device) -> "Digits":
        """Always the same split."""
        pixels, targets = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32, device=device) / 16
        labels = torch.tensor(targets, device=device)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
        order = order.to(device)
        test, train = order[: len(order) // 5], order[len(order) // 5 :]
        return cls(images[train], labels[train], images[test], labels[test])


@dataclass(frozen=True)
class Result:
    """What one run gave."""

    losses: list[float]  # the mean over each epoch
    accuracy: float
    seconds: float
    peak_bytes: int


def train(
    recipe: Recipe, digits: Digits, epochs: int, after_epoch: Callable[[], None] = lambda: None
) -> Result:
    """Trains a fresh model; the time is that of the epochs, without set-up and test."""
    device = digits.train_images.device
    torch.manual_seed(SEED)
    model = nn.Sequential(
        nn.Linear(64, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, 10),
    ).to(device)
    optimizer = recipe.optimizer(model.parameters(), lr=LEARNING_RATE)
    scaler = recipe.scaler(device.type, enabled=recipe.mixed)
    criterion = recipe.criterion(scaler)
    reset_peak_memory(device)
    losses: list[float] = []

    start = time.perf_counter()
    for _ in range(epochs):
        total = torch.zeros((), device=device)
        order = torch.randperm(len(digits.train_labels)).to(device)
        batches = order.split(BATCH)
        for batch in batches:
            with torch.autocast(device.type, low_precision(device), enabled=recipe.mixed):
                logits = model(digits.train_images[batch])
                loss = criterion(logits, digits.train_labels[batch])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if not recipe.clips_itself:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            scaler.step(optimizer)
            scaler.update()
            total += loss.detach()
        losses.append(total.item() / len(batches))  # waits for the device
        after_epoch()
    seconds = time.perf_counter() - start

    peak = peak_memory(device)
    with torch.no_grad():
        right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    return Result(losses, right.float().mean().item(), seconds, peak)


def show(console: Console, device: torch.device, epochs: int, results: dict[str, Result]) -> None:
    """Prints the table."""
    low = str(low_precision(device)).removeprefix("torch.")
    whose = "GPU tensors" if device.type == "cuda" else "whole process"
    table = Table(title=f"digits, {epochs} epochs on {device.type}")
    table.add_column("run")
    table.add_column("autocast")
    for heading in ("seconds", f"peak MiB ({whose})", "last loss", "test accuracy"):
        table.add_column(heading, justify="right")
    for recipe in RECIPES:
        result = results[recipe.name]
        table.add_row(
            recipe.name,
            low if recipe.mixed else "off",
            f"{result.seconds:.2f}",
            f"{result.peak_bytes / 2**20:.1f}",
            f"{result.losses[-1]:.5f}",
            f"{result.accuracy:.1%}",
        )
    console.print(table)
    console.print(
        "The model is tiny and each run was timed once: this shows that the runs train alike, "
        "not which is faster. benchmarks/ measures that."
    )


def plot(path: Path, results: dict[str, Result]) -> None:
    """Draws the losses of all runs over the epochs."""
    from matplotlib.figure import Figure

    styles: dict[str, dict[str, Any]] = {
        "float32": {"color": "#a8b3bd", "linewidth": 4},
        "torch.amp": {"color": "#5b7c99", "linewidth": 2},
        "ampfuse": {"color": "#d9542b", "linewidth": 2, "linestyle": (0, (4, 4))},
    }
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        epochs = range(1, len(result.losses) + 1)
        label = f"{name}, test accuracy {result.accuracy:.1%}"
        axes.plot(epochs, result.losses, label=label, **styles[name])
    axes.set(yscale="log", xlabel="epoch", ylabel="training loss", title="Digits, same seed")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Runs the three recipes; 1 when one of them did not learn."""
    parser = argparse.ArgumentParser(description="Train on digits in float32, torch.amp, ampfuse.")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("digits.png"), help="the plot")
    given = parser.parse_args()
    if given.epochs < 1:
        parser.error(f"--epochs: at least 1, got {given.epochs}")

    console = Console()
    device = torch.device(given.device)
    digits = Digits.load(device)
    results: dict[str, Result] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(RECIPES) * given.epochs)
        for recipe in RECIPES:
            progress.update(task, description=recipe.name)
            train(recipe, digits, epochs=1)  # warm-up: first calls load kernels and start threads
            results[recipe.name] = train(
                recipe, digits, given.epochs, after_epoch=lambda: progress.advance(task)
            )

    show(console, device, given.epochs, results)
    plot(given.out, results)
    console.print(f"wrote {given.out}")
    poor = [name for name, result in results.items() if result.accuracy < LEAST_ACCURACY]
    if poor:
        print(f"test accuracy under {LEAST_ACCURACY:.0%}: {', '.join(poor)}", file=sys.stderr)
    return 1 if poor else 0


if __name__ == "__main__":
    sys.exit(main())
