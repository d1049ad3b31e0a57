"""Trains the CIFAR-10 network of PyTorch's tutorials in float32, with torch.amp and with ampfuse.

The optimizer is SGD with momentum, as there.

    python examples/image_classifier.py [--data FOLDER] [--width 8] [--epochs 10] [--batch 512]

Each run trains with three seeds, to compare accuracies, too. `--data` is a folder with CIFAR-10, as
torchvision downloads it. Without it, images of ten made patterns take its place.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from classification import Classified, accuracies, agreement, dots, made_images
from comparison import (
    AMPFUSE,
    FLOAT32,
    TORCH_AMP,
    Optimizer,
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
    warm_up,
)
from meter import Meter
from rich.console import Console
from torch import Tensor, nn

RUNS = (FLOAT32, TORCH_AMP, AMPFUSE)
NOISE, SHIFT = 3.5, 6  # of made images
MOMENTUM = 0.9  # of SGD, as in the tutorials


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
        train_set = made_images(given.images, 1, noise=NOISE, shift=SHIFT)
        test_set = made_images(1000, 2, noise=NOISE, shift=SHIFT)
    images, classes = (tensor.to(given.device) for tensor in train_set)
    test_images, test_classes = (tensor.to(given.device) for tensor in test_set)
    sgd = Optimizer("SGD", {"lr": given.lr, "momentum": MOMENTUM})
    warm_up(given, Network(1), made_images(2, 0, noise=0, shift=0), sgd)
    meter = Meter(given.device)
    of_seeds = []
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        model = Network(given.width).to(given.device)
        made = recipe(given.only, model, given, sgd)
        meter.start()
        for _ in range(given.epochs):
            # torch.randperm on the CPU gives all devices and precisions the same batches.
            order = torch.randperm(len(images)).to(given.device)
            for chosen in torch.split(order, given.batch):
                made.step(model, images[chosen], classes[chosen])
            meter.lap()
        with torch.no_grad(), made.autocast:
            logits = torch.cat([model(some) for some in torch.split(test_images, given.batch)])
        of_seeds.append((logits.argmax(1) == test_classes).float().mean().item())
    meter.begin_memory()
    for chosen in torch.split(order, given.batch)[:2]:
        made.step(model, images[chosen], classes[chosen])
    return Classified(meter.seconds, meter.peak(), of_seeds)


def plot(path: Path, results: Mapping[str, Classified], title: str) -> None:
    """Draw the time and the memory of each run, and the accuracy of each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    figure.suptitle(f"{headline(results)}\n{title}")
    time, memory, accuracy = figure.subplots(1, 3)
    seconds = {name: one.seconds for name, one in results.items()}
    peaks = {name: one.peak_bytes / 2**20 for name, one in results.items()}
    bars(time, seconds, "seconds of the fastest epoch", "%.2f")
    bars(memory, peaks, "peak memory, MiB", "%.0f")
    dots(accuracy, results)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Make the runs, and compare them."""
    options = parser(__doc__, "image_classifier.png", RUNS)
    options.add_argument("--data", type=Path, help="a folder with CIFAR-10")
    options.add_argument("--images", type=int, default=4096, help="made for training")
    options.add_argument("--width", type=int, default=1, help="1 is the tutorials' network")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--lr", type=float, default=0.01)
    given = parsed(options)
    if given.only:
        report(train(given), given.report)
        return 0

    console = Console()
    reports = run_all(of_this_program(RUNS), given.seeds * given.epochs, console)
    results = {name: Classified(**figures) for name, figures in reports.items()}
    data = "CIFAR-10" if given.data else f"{given.images} made images"
    title = f"{given.epochs} epochs of {data}, {given.precision}, {given.device}"
    console.print(table(results, title, "epoch", accuracies(results)))
    console.print(verdict(results, given.device), agreement(results))
    plot(given.out, results, title)
    console.print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
