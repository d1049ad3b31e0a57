"""Trains a Vision Transformer in float32, with torch.amp and with ampfuse.

    python examples/vit.py [--model base] [--batch 64] [--budget 8GiB]

The table compares time, memory, accuracy, and the largest batch that fits the budget, which on a
GPU is its memory by default. There, steps with other batches find it; on a CPU it is predicted from
the sizes of the tensors, though a process takes more than these.

The tiny model is 192 wide, has 3 layers and images of 32 x 32; `base` is ViT-Base with 86 million
parameters and images of 224 x 224. The images are of ten made patterns.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ampfuse.memory
import torch
from classification import CLASSES, Classified, accuracies, agreement, dots, made_images
from comparison import (
    AMPFUSE,
    FLOAT32,
    NARROW,
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

RUNS = (FLOAT32, TORCH_AMP, AMPFUSE, NARROW)
NOISE = 0.7  # of made images
# The size of images and patches, the width, the number of layers and of heads.
MODELS = {"tiny": (32, 4, 192, 3, 3), "base": (224, 16, 768, 12, 12)}


@dataclass(frozen=True)
class Fitted(Classified):
    """The measurements of one run, and the largest batch that fits the budget."""

    largest_batch: int


class VisionTransformer(nn.Module):
    """Cuts images into patches, and classifies what the first token has become."""

    def __init__(self, size: int, patch: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [images, CLASSES]."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(images), -1, -1), patches], 1)
        hidden: Tensor = self.layers(tokens + self.position)
        logits: Tensor = self.head(hidden[:, 0])
        return logits


def train(given: Any) -> Fitted:
    """Train with each seed in one precision; return what was measured."""
    size = MODELS[given.model][0]

    def batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
        images, classes = made_images(count, seed, noise=NOISE, shift=0, size=size)
        return images.to(given.device), classes.to(given.device)

    tests = [batch(given.batch, -1 - number) for number in range(1 + 256 // given.batch)]
    adamw = Optimizer("AdamW", {"lr": given.lr})
    small = made_images(2, 0, noise=0, shift=0, size=8)
    warm_up(given, VisionTransformer(8, 4, 16, 1, 2), small, adamw)
    meter = Meter(given.device)
    of_seeds = []
    for seed in range(given.seeds):
        torch.manual_seed(seed)
        model = VisionTransformer(*MODELS[given.model]).to(given.device)
        made = recipe(given.only, model, given, adamw)
        for number in range(given.steps):
            images, classes = batch(given.batch, seed * given.steps + number)
            meter.start()
            made.step(model, images, classes)
            meter.lap()
        with torch.no_grad(), made.autocast:
            right = torch.cat([model(some).argmax(1) == answers for some, answers in tests])
        of_seeds.append(right.float().mean().item())
    meter.begin_memory()
    for _ in range(2):
        made.step(model, images, classes)
    peak = meter.peak()

    def step_with(count: int) -> None:
        images = torch.zeros(count, 3, size, size, device=given.device)
        made.step(model, images, torch.zeros(count, device=given.device).long())

    largest = ampfuse.memory.largest_batch(
        model, made.optimizer, step_with, memory=given.budget, device=given.device
    )
    return Fitted(meter.seconds, peak, of_seeds, largest.largest)


def plot(path: Path, results: Mapping[str, Fitted], title: str, budget: str) -> None:
    """Draw time, memory and the largest batch of each run, and the accuracy of each seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    figure.suptitle(f"{headline(results)}\n{title}")
    (time, memory), (batch, accuracy) = figure.subplots(2, 2)
    seconds = {name: one.seconds for name, one in results.items()}
    peaks = {name: one.peak_bytes / 2**20 for name, one in results.items()}
    batches = {name: one.largest_batch for name, one in results.items()}
    bars(time, seconds, "seconds of the fastest step", "%.3f")
    bars(memory, peaks, "peak memory, MiB", "%.0f")
    bars(batch, batches, f"largest batch that fits {budget}", "%.0f")
    dots(accuracy, results)
    figure.savefig(path, dpi=150)


def main() -> int:
    """Make the runs, and compare them."""
    options = parser(__doc__, "vit.png", RUNS)
    options.add_argument("--model", choices=MODELS, default="tiny")
    options.add_argument("--steps", type=int, default=10, help="with each seed")
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--lr", type=float, default=5e-4)
    options.add_argument("--budget", help="memory for the largest batch, for example 8GiB")
    given = parsed(options)
    on_cpu = given.device == "cpu"
    given.budget = given.budget or ("8GiB" if on_cpu else None)
    if given.only:
        report(train(given), given.report)
        return 0

    console = Console()
    reports = run_all(of_this_program(RUNS), given.seeds * given.steps, console)
    results = {name: Fitted(**figures) for name, figures in reports.items()}
    title = f"ViT {given.model}, batches of {given.batch}, {given.precision}, {given.device}"
    budget = given.budget or "the GPU"
    largest = [one.largest_batch for one in results.values()]
    more = {f"batch in {budget}": [f"{one:,}" for one in largest], **accuracies(results)}
    console.print(table(results, title, "step", more))
    found = "predicted for its tensors alone" if on_cpu else "found by steps"
    console.print(
        verdict(results, given.device),
        f"The largest batch in {budget} grows from {largest[0]:,} to {max(largest):,}, {found}.",
        agreement(results),
    )
    plot(given.out, results, title, budget)
    console.print(f"wrote {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
