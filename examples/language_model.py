"""Trains a small language model on Python's own source, with torch's loss and with ampfuse's.

    python examples/language_model.py [--steps 60] [--batch 2048] [--vocabulary 20000] [--device D]

The model guesses the next word of a program from the eight before it: embeddings, two layers, and
a last one that has the embeddings' weight and a logit for each word. `torch` trains with autocast,
GradScaler, clipping and AdamW of torch, and a loss of all logits. `ampfuse` has its own, and a loss
that takes the last layer's inputs: it multiplies a few hundred rows at a time, so that the logits
are never there at once. Its scale is folded into gradients before they are rounded, and each step's
two halves share the denominator of the whole.
"""
# mypy: disable-error-code="attr-defined, no-untyped-call"
# (torch's GradScaler, backward and split have no types: no reason to clutter the loop)

import argparse
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ampfuse
import torch
from devices import low_precision, peak_memory, reset_peak_memory
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

SEED = 0
CONTEXT = 8
WIDTH = 128
HALVES = 2
LEARNING_RATE = 2e-3
MAX_GRAD_NORM = 1.0
# A model that knows how frequent 20,000 words are, and no more, is at 5.50.
ENOUGH = 5.0


def words_of_python(vocabulary: int) -> Tensor:
    """The standard library's words as numbers, the most frequent first; 0 for rare ones."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "\n".join(file.read_text(errors="ignore") for file in files)
    words = re.findall(r"\w+|[^\w\s]|\n", text)
    known = [word for word, _ in Counter(words).most_common(vocabulary - 1)]
    number = {word: index + 1 for index, word in enumerate(known)}
    return torch.tensor([number.get(word, 0) for word in words])


class Model(nn.Module):
    """From the words before to what the last layer is given."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.layers = nn.Sequential(
            nn.Linear(CONTEXT * WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, words: Tensor) -> Tensor:
        """Hidden states [batch, WIDTH]."""
        hidden: Tensor = self.layers(self.embedding(words).flatten(1))
        return hidden


@dataclass(frozen=True)
class Result:
    """What one run gave."""

    losses: list[float]
    seconds: float  # of a step
    peak_bytes: int


class Torch:
    """The loss of all logits."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.model = model
        self.scaler = torch.amp.GradScaler(device.type)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE
        )

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """A half's part of the mean."""
        logits = functional.linear(hidden, self.model.embedding.weight)
        return functional.cross_entropy(logits, target) / HALVES

    def step(self) -> None:
        """Clips, and updates what was trained."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Ampfuse:
    """The loss without them."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self.scaler = ampfuse.GradScaler(device.type)
        vocabulary = model.embedding.num_embeddings
        self.criterion = ampfuse.LinearCrossEntropyLoss(
            WIDTH, vocabulary, scaler=self.scaler, device=device
        )
        self.criterion.linear.weight = model.embedding.weight
        self.optimizer: torch.optim.Optimizer = ampfuse.AdamW(
            model.parameters(), lr=LEARNING_RATE, max_grad_norm=MAX_GRAD_NORM
        )

    def loss(self, hidden: Tensor, target: Tensor) -> Tensor:
        """A half's part of the mean."""
        loss: Tensor = self.criterion(hidden, target, denominator=HALVES * len(target))
        return loss

    def step(self) -> None:
        """Unscales and clips as it updates."""
        self.scaler.step(self.optimizer)
        self.scaler.update()


RECIPES: dict[str, Callable[[Model, torch.device], Torch | Ampfuse]] = {
    "torch": Torch,
    "ampfuse": Ampfuse,
}


def train(
    recipe: Callable[[Model, torch.device], Torch | Ampfuse],
    words: Tensor,
    vocabulary: int,
    steps: int,
    batch: int,
    after_step: Callable[[], None] = lambda: None,
) -> Result:
    """Trains a fresh model; the time is the median of the steps'."""
    device = words.device
    torch.manual_seed(SEED)
    model = Model(vocabulary).to(device)
    how = recipe(model, device)
    windows = words.unfold(0, CONTEXT + 1, 1)
    batches = torch.Generator().manual_seed(SEED)
    reset_peak_memory(device)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        rows = windows[torch.randint(len(windows), (batch,), generator=batches).to(device)]
        how.optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for half in rows.chunk(HALVES):
            with torch.autocast(device.type, low_precision(device)):
                loss = how.loss(model(half[:, :CONTEXT]), half[:, CONTEXT])
            how.scaler.scale(loss).backward()
            total += loss.detach()
        how.step()
        losses.append(total.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
        after_step()
    return Result(losses, sorted(seconds)[steps // 2], peak_memory(device))


def main() -> int:
    """Runs both; 1 when one of them did not learn."""
    parser = argparse.ArgumentParser(description="Train a language model with two losses.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=20000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    if given.steps < 1 or given.vocabulary < 2 or given.batch < HALVES or given.batch % HALVES:
        parser.error("expected at least one step and two words, and an even batch")

    console = Console()
    device = torch.device(given.device)
    words = words_of_python(given.vocabulary).to(device)
    results: dict[str, Result] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(RECIPES) * given.steps)
        for name, recipe in RECIPES.items():
            progress.update(task, description=name)
            results[name] = train(
                recipe,
                words,
                given.vocabulary,
                given.steps,
                given.batch,
                lambda: progress.advance(task),
            )

    whose = "GPU tensors" if device.type == "cuda" else "whole process"
    table = Table(title=f"{len(words)} words, {given.vocabulary} of them different, {device.type}")
    table.add_column("run")
    for heading in ("ms per step", f"peak MiB ({whose})", "first loss", "last loss"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.seconds * 1e3:.0f}",
            f"{result.peak_bytes / 2**20:.0f}",
            f"{result.losses[0]:.3f}",
            f"{result.losses[-1]:.3f}",
        )
    console.print(table)
    poor = [name for name, result in results.items() if result.losses[-1] > ENOUGH]
    if poor:
        told = f"last loss above {ENOUGH} after {given.steps} steps: {', '.join(poor)}"
        print(told, file=sys.stderr)
    return 1 if poor else 0


if __name__ == "__main__":
    sys.exit(main())
