"""Trains bfloat16 models with each form of weights and state, and compares their losses.

    python benchmarks/state_formats.py [--steps 1000] [--out state_formats.png]

The language model and the Vision Transformer of examples/, with three seeds and two second betas.
Each run clips its gradients, and in one of 97 steps they overflow, so that it is skipped. Results
are added to a CSV beside the picture. Runs that it has are not repeated.
"""

import argparse
import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import ampfuse
import torch
from torch import Tensor, nn
from torch.nn import functional

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path += [str(EXAMPLES), str(EXAMPLES / "language_model")]
import text  # noqa: E402
from classification import made_images  # noqa: E402
from model import LanguageModel  # noqa: E402
from vit import VisionTransformer  # noqa: E402

MASTERS = "float32 masters, 14 bytes"
FORMS: dict[str, dict[str, Any]] = {
    MASTERS: {},
    "8-bit, remainders, 6.1 bytes": {"state_dtype": "8bit", "master_weights": "remainder"},
    "8-bit, stochastic, 4.1 bytes": {"state_dtype": "8bit", "master_weights": "stochastic"},
    "no masters, 10 bytes": {"master_weights": False},
}
COLORS = dict(zip(list(FORMS)[1:], ("#5b7c99", "#d9542b", "#b8b8b8"), strict=True))
BETAS = (0.95, 0.999)
SEEDS = 3
SPAN = 20  # steps whose mean loss is stored
LAST = 5  # spans at the end whose mean counts
COLUMNS = ("task", "form", "beta2", "seed", "skipped", "losses")
VOCABULARY, LENGTH = 2048, 32
Batches = Iterator[tuple[Tensor, Tensor]]


class WithLogits(nn.Module):
    """The language model, with the logits from its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel(64, 2, False, VOCABULARY, LENGTH)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits [words, VOCABULARY]."""
        hidden = self.model(words).flatten(0, 1)
        logits: Tensor = functional.linear(hidden, self.model.embedding.weight)
        return logits


def words(steps: int) -> Batches:
    """Yield passages, and the next word of each of their words."""
    for passages, targets in text.batches(text.words(VOCABULARY), steps, 16, LENGTH):
        yield passages, targets.flatten()


def images(steps: int) -> Batches:
    """Yield images with so much noise that a loss of about 1 is left, and their classes."""
    for step in range(steps):
        pictures, classes = made_images(32, step, noise=5.0, shift=2)
        yield pictures.bfloat16(), classes


TASKS = {
    "language model": (WithLogits, words),
    "Vision Transformer": (lambda: VisionTransformer(32, 8, 64, 2, 2), images),
}


def train(task: str, form: str, beta2: float, seed: int, steps: int) -> tuple[list[float], int]:
    """Return the mean losses of spans of steps, and the number of skipped steps."""
    torch.manual_seed(seed)
    make, batches = TASKS[task]
    model = make().bfloat16()
    optimizer = ampfuse.AdamW(
        model.parameters(),
        lr=1e-3,
        betas=(0.9, beta2),
        weight_decay=0.1,
        max_grad_norm=1.0,
        seed=seed,
        **FORMS[form],
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-5)
    scaler = ampfuse.GradScaler("cpu")
    losses, skipped = [], 0
    for step, (inputs, targets) in enumerate(batches(steps), 1):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs).float(), targets)
        overflow = torch.inf if step % 97 == 0 else 1.0
        scaler.scale(loss * overflow).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.was_skipped()
        schedule.step()
        losses.append(loss.item())
    means = [fmean(losses[first : first + SPAN]) for first in range(0, steps, SPAN)]
    return means, skipped


def plot(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw how far losses are from those with float32 masters, as means of 5 spans.

    A thin line is one seed, and a thick one is the mean of all seeds.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle("Loss of bfloat16 models, compared with float32 masters and moments (14 bytes)")
    all_axes = figure.subplots(len(TASKS), len(BETAS), sharex=True, sharey=True)
    steps = SPAN * torch.arange(LAST, len(rows[0]["losses"]) + 1)
    for of_task, task in zip(all_axes, TASKS, strict=True):
        for axes, beta2 in zip(of_task, BETAS, strict=True):
            masters = smooth(chosen(rows, task, MASTERS, beta2))
            for form, color in COLORS.items():
                apart = 100 * (smooth(chosen(rows, task, form, beta2)) / masters - 1)
                axes.plot(steps, apart.T, color=color, linewidth=0.6)
                axes.plot(steps, apart.mean(0), color=color, linewidth=2, label=form)
            axes.axhline(0, color="black", linewidth=0.6)
            axes.set_title(f"{task}, β₂ = {beta2}")
            axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].legend(frameon=False)
    all_axes[-1][0].set(xlabel="step", ylabel="loss, % above masters")
    figure.savefig(path, dpi=130)


def smooth(rows: list[dict[str, Any]]) -> Tensor:
    """Return moving means of losses [runs, spans]."""
    return torch.tensor([row["losses"] for row in rows]).unfold(1, LAST, 1).mean(2)


def chosen(rows: list[dict[str, Any]], task: str, form: str, beta2: float) -> list[dict[str, Any]]:
    """Return the rows of a task with a form and a second beta, in the order of seeds."""
    found = [row for row in rows if (row["task"], row["form"], row["beta2"]) == (task, form, beta2)]
    return sorted(found, key=lambda row: int(row["seed"]))


def final(row: dict[str, Any]) -> float:
    """Return the mean of a run's last losses."""
    return fmean(row["losses"][-LAST:])


def show(rows: list[dict[str, Any]]) -> None:
    """Print the final losses, and how far each form is from float32 masters."""
    for task in TASKS:
        for beta2 in BETAS:
            print(f"{task}, second beta {beta2}")
            reference = [final(row) for row in chosen(rows, task, MASTERS, beta2)]
            for form in FORMS:
                runs = chosen(rows, task, form, beta2)
                losses = [final(row) for row in runs]
                apart = fmean(losses) / fmean(reference) - 1
                skipped = ", ".join(str(row["skipped"]) for row in runs)
                print(f"  {form:30} {fmean(losses):.4f} {apart:+.2%}  skipped {skipped}")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs in a file."""
    if not path.exists():
        return []
    with path.open() as file:
        rows: list[dict[str, Any]] = list(csv.DictReader(file))
    for row in rows:
        row["beta2"] = float(row["beta2"])
        row["losses"] = [float(loss) for loss in row["losses"].split()]
    return rows


def main() -> None:
    """Make the runs that are missing, and compare all."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--out", type=Path, default=Path("state_formats.png"))
    given = options.parse_args()
    path = given.out.with_suffix(".csv")
    rows = read(path)
    for seed in range(SEEDS):
        for task in TASKS:
            for beta2 in BETAS:
                for form in FORMS:
                    if len(chosen(rows, task, form, beta2)) > seed:
                        continue
                    losses, skipped = train(task, form, beta2, seed, given.steps)
                    texts = " ".join(f"{loss:.5g}" for loss in losses)
                    is_new = not path.exists()
                    with path.open("a", newline="") as file:
                        writer = csv.writer(file)
                        if is_new:
                            writer.writerow(COLUMNS)
                        writer.writerow((task, form, beta2, seed, skipped, texts))
                    rows = read(path)
                    print(f"{task}, {form}, {beta2}, seed {seed}: {fmean(losses[-LAST:]):.4f}")
    show(rows)
    plot(given.out, rows)


if __name__ == "__main__":
    main()
