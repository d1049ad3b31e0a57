"""Trains the CIFAR-10 network of PyTorch's tutorials in float32, with torch.amp and with ampfuse.

    python examples/image_classifier.py [--data FOLDER] [--width 8] [--epochs 10] [--batch 512]

Each run trains with three seeds, to compare accuracies, too. `--data` is a folder with CIFAR-10, as
torchvision downloads it. Without it, images of ten made patterns take its place.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from comparison import (
    AMPFUSE,
    COLORS,
    FLOAT32,
    TORCH_AMP,
    Figures,
    bars,
    headline,
    of_this_program,
    parsed,
    parser,
    recipe,
    report,
    run_all,
    table,
    verdict,
)
from meter import Meter
from rich.console import Console
from torch import Tensor, nn

RUNS = (FLOAT32, TORCH_AMP, AMPFUSE)
SEEDS = 3
NOISE = 3.5  # standard deviation, where that of a pattern is 1


@dataclass(frozen=True)
class Classified(Figures):
    """The measurements of one run, and its accuracy on the test images with each seed."""

    accuracies: list[float]


class Network(nn.Sequential):
    """The network of the tutorials, or one that is `width` times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Conv2d(3, 6 * width, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6 * width, 16 * width, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * width * 5 * 5, 120 * width),
            nn.ReLU(),
            nn.Linear(120 * width, 84 * width),
            nn.ReLU(),
            nn.Linear(84 * width, 10),
        )


def made_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images [count, 3, 32, 32] of ten patterns, shifted and with noise; and their classes.

    The patterns are the same for every seed.
    """
    of_patterns = torch.Generator().manual_seed(0)
    coarse = torch.randn(10, 3, 8, 8, generator=of_patterns)
    patterns = nn.functional.interpolate(coarse, size=(32, 32), mode="bicubic")
    patterns /= patterns.std((1, 2, 3), keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(10, (count,), generator=generator)
    shifts = torch.randint(-6, 7, (count, 2), generator=generator).tolist()
    images = torch.stack(
        [patterns[one].roll(shift, (1, 2)) for one, shift in zip(classes, shifts, strict=True)]
    )
    return images + NOISE * torch.randn(images.shape, generator=generator), classes


def cifar(folder: Path, train: bool) -> tuple[Tensor, Tensor]:
    """Return the images [count, 3, 32, 32] of CIFAR-10, and their classes."""
    from torchvision.datasets import CIFAR10

    files = CIFAR10(str(folder), train=train)
    images = torch.from_numpy(files.data).permute(0, 3, 1, 2)
    return images.float() / 127.5 - 1, torch.tensor(files.targets)


def train(given: Any) -> Classified:
    """Train with each seed in one precision; return the time of epochs, memory and accuracies."""
    if given.data:
        train_set, test_set = cifar(given.data, True), cifar(given.data, False)
    else:
        train_set, test_set = made_images(given.images, seed=1), made_images(1000, seed=2)
    images, classes = (tensor.to(given.device) for tensor in train_set)
    test_images, test_classes = (tensor.to(given.device) for tensor in test_set)
    meter = Meter(given.device)
    accuracies = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        model = Network(given.width).to(given.device)
        made = recipe(given.only, model, given.device, given.precision, given.lr)
        meter.start()
        for _ in range(given.epochs):
            # torch.randperm on the CPU gives all devices and precisions the same batches.
            order = torch.randperm(len(images)).to(given.device)
            for chosen in torch.split(order, given.batch):
                made.optimizer.zero_grad()
                with made.autocast:
                    loss = made.criterion(model(images[chosen]), classes[chosen])
                made.scaler.scale(loss).backward()
                made.scaler.step(made.optimizer)
                made.scaler.update()
            meter.lap()
        with torch.no_grad(), made.autocast:
            logits = torch.cat([model(some) for some in torch.split(test_images, given.batch)])
        accuracies.append((logits.argmax(1) == test_classes).float().mean().item())
    return Classified(meter.seconds, meter.peak(), accuracies)


def agreement(results: Mapping[str, Classified]) -> str:
    """Compare the differences of accuracy between precisions with those between seeds."""
    means = [fmean(one.accuracies) for one in results.values()]
    apart = max(means) - min(means)
    spread = max(max(one.accuracies) - min(one.accuracies) for one in results.values())
    if apart <= spread:
        return (
            f"The precisions are equally accurate: their means differ by {apart:.1%}, and two "
            f"seeds of the same precision by up to {spread:.1%}."
        )
    return (
        f"The precisions are not equally accurate: their means differ by {apart:.1%}, and two "
        f"seeds of the same precision by {spread:.1%} at most."
    )


def plot(path: Path, results: Mapping[str, Classified], title: str) -> None:
    """Draw the time and the memory of each run, and the accuracy of each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    figure.suptitle(f"{headline(results)}\n{title}")
    time, memory, accuracy = figure.subplots(1, 3)
    seconds = {name: one.seconds for name, one in results.items()}
    peaks = {name: one.peak_bytes / 2**20 for name, one in results.items()}
    bars(time, seconds, "seconds of an epoch, medians", "%.2f")
    bars(memory, peaks, "peak memory, MiB", "%.0f")
    for name, one in results.items():
        accuracy.scatter(one.accuracies, [name] * SEEDS, color=COLORS[name], s=60, alpha=0.7)
    accuracy.set_title(f"accuracy with {SEEDS} seeds")
    accuracy.margins(y=0.3)
    accuracy.invert_yaxis()
    accuracy.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Make the runs, and compare them."""
    options = parser(__doc__, "image_classifier.png", RUNS)
    options.add_argument("--data", type=Path, help="a folder with CIFAR-10")
    options.add_argument("--images", type=int, default=4096, help="made for training")
    options.add_argument("--width", type=int, default=1, help="1 is the tutorials' network")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--lr", type=float, default=2e-3)
    given = parsed(options)
    if given.only:
        report(train(given), given.report)
        return 0

    console = Console()
    reports = run_all(of_this_program(RUNS), SEEDS * given.epochs, console)
    results = {name: Classified(**figures) for name, figures in reports.items()}
    data = "CIFAR-10" if given.data else f"{given.images} made images"
    title = f"{given.epochs} epochs of {data}, {given.precision}, {given.device}"
    accuracy = {
        f"accuracy, {SEEDS} seeds": [
            " ".join(f"{100 * part:.1f}" for part in sorted(one.accuracies)) + " %"
            for one in results.values()
        ]
    }
    console.print(table(results, title, "epoch", accuracy))
    console.print(verdict(results, given.device), agreement(results))
    plot(given.out, results, title)
    console.print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
