"""Compares ways to train a model: what the programs beside this file share.

Each way is trained in a process of its own, so that its memory is not mixed with others'. This
process measures itself with a `Meter` (meter.py), and the one that started it prints a table.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ampfuse
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

FLOAT32, TORCH_AMP, AMPFUSE, NARROW = "float32", "torch.amp", "ampfuse", "+ bf16 weights"
COLORS = {FLOAT32: "#a8b3bd", TORCH_AMP: "#5b7c99", AMPFUSE: "#d9542b", NARROW: "#7d5ba6"}
EXACT = 32 * 2**20  # on a CPU, the memory of equal runs differs by up to this


@dataclass(frozen=True)
class Figures:
    """The measurements of one run."""

    laps: list[float]  # seconds of each step or epoch
    peak_bytes: int  # peak memory, minus that before the model was made

    @property
    def seconds(self) -> float:
        """The fastest lap: what else runs on the machine can only make laps longer."""
        return min(self.laps)


@dataclass(frozen=True)
class Recipe:
    """The parts of a training step besides the model and a batch."""

    autocast: torch.autocast
    criterion: nn.Module
    scaler: GradScaler
    optimizer: torch.optim.Optimizer

    def step(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        """Make a training step."""
        self.optimizer.zero_grad()
        with self.autocast:
            loss = self.criterion(model(inputs), targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


@dataclass(frozen=True)
class Optimizer:
    """An optimizer that torch and ampfuse have, by its name, and its options."""

    name: str
    options: dict[str, Any]


def recipe(name: str, model: nn.Module, given: Any, optimizer: Optimizer) -> Recipe:
    """Return what trains a model in one of the ways: float32, torch.amp, or ampfuse.

    For `NARROW`, this converts the model to bfloat16. Its masters are not a second copy in float32:
    the optimizer keeps the 16 bits that the parameters lack.
    """
    device = given.device
    dtype = torch.bfloat16 if name == NARROW else getattr(torch, given.precision)
    autocast = torch.autocast(device, dtype, enabled=name != FLOAT32)
    is_scaled = name != FLOAT32 and dtype == torch.float16
    if name in (FLOAT32, TORCH_AMP):
        plain_scaler = GradScaler(device, enabled=is_scaled)
        of_torch = getattr(torch.optim, optimizer.name)
        plain_optimizer = of_torch(model.parameters(), **optimizer.options)
        return Recipe(autocast, nn.CrossEntropyLoss(), plain_scaler, plain_optimizer)
    if name == NARROW:
        model.to(torch.bfloat16)
    scaler = ampfuse.GradScaler(device, enabled=is_scaled)
    masters = "remainder" if name == NARROW else "auto"
    ours = getattr(ampfuse, optimizer.name)
    fused = ours(model.parameters(), **optimizer.options, master_weights=masters)
    return Recipe(autocast, ampfuse.CrossEntropyLoss(scaler=scaler), scaler, fused)


def warm_up(
    given: Any, model: nn.Module, batch: tuple[Tensor, Tensor], optimizer: Optimizer
) -> None:
    """Make a step of another model, so that libraries load what they need before memory counts."""
    inputs, targets = batch
    model.to(given.device)
    made = recipe(given.only, model, given, optimizer)
    made.step(model, inputs.to(given.device), targets.to(given.device))


def parser(
    description: str | None, picture: str, runs: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Return a parser with the options that all programs have.

    `runs`: names of runs for each of which the program starts itself.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_gpu = torch.cuda.is_available()
    made.add_argument("--device", default="cuda" if on_gpu else "cpu")
    made.add_argument("--precision", choices=["bfloat16", "float16"], help="of autocast")
    made.add_argument("--out", type=Path, default=Path(picture), help="the picture")
    if runs:
        made.add_argument("--only", choices=runs, help="make this run alone, and no table")
        made.add_argument("--report", type=Path, help="where --only writes its figures, as JSON")
    return made


def parsed(made: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the options of the command line."""
    given = made.parse_args()
    # A CPU multiplies float16 matrices slowly, and bfloat16 needs no scaler.
    given.precision = given.precision or ("bfloat16" if given.device == "cpu" else "float16")
    return given


def report(figures: Any, path: Path | None) -> None:
    """Write the figures of this run to the file of `--report`, or print them."""
    text = json.dumps(asdict(figures))
    if path is None:
        print(text)
    else:
        path.write_text(text)


def of_this_program(names: Sequence[str]) -> dict[str, list[str]]:
    """Return commands that run this program with its own options, once for each name."""
    return {name: [*sys.argv, "--only", name] for name in names}


def run_all(commands: dict[str, list[str]], steps: int, console: Console) -> dict[str, Any]:
    """Run each command of `steps` steps, show the progress, and return what each reports."""
    columns = (TextColumn("{task.description:22}"), BarColumn(), TimeElapsedColumn())
    reports = {}
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(commands) * steps)
        for name, command in commands.items():
            progress.update(task, description=name)
            if not console.is_terminal:  # which shows no progress
                console.print(f"{name}: training")
            reports[name] = _run(command, lambda: progress.advance(task))
    return reports


def _run(command: list[str], after_step: Callable[[], None]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        program = subprocess.Popen(
            [sys.executable, *command, "--report", str(path)], stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        for line in program.stdout:
            if line.startswith("step "):
                after_step()
        if program.wait() != 0:
            sys.exit(f"{' '.join(command)} failed: see above")
        return json.loads(path.read_text())


def table(
    results: Mapping[str, Figures], title: str, lap: str, more: Mapping[str, list[str]]
) -> Table:
    """Return a table with a row for each run, compared with the first run.

    `lap`: what takes the seconds, for example "step". `more`: further columns by their headings.
    """
    first, *_ = results
    caption = (
        f"s per {lap}: of the fastest; × {first}: how many times as fast; "
        "peak: the most memory of the run, less what it held before the model was made"
    )
    columns = {
        f"s per {lap}": [f"{one.seconds:.3f}" for one in results.values()],
        f"× {first}": [f"{results[first].seconds / one.seconds:.2f}" for one in results.values()],
        "peak MiB": [f"{one.peak_bytes / 2**20:.0f}" for one in results.values()],
        f"of {first}": [
            f"{one.peak_bytes / results[first].peak_bytes:.0%}" for one in results.values()
        ],
        **more,
    }
    drawn = Table(title=title, caption=caption)
    drawn.add_column("run", no_wrap=True)
    for heading, cells in columns.items():
        width = max(map(len, [*heading.split(), *cells]))  # only a heading takes several lines
        drawn.add_column(heading, justify="right", width=width)
    for row in zip(results, *columns.values(), strict=True):
        drawn.add_row(*row)
    return drawn


def verdict(results: Mapping[str, Figures], device: str) -> str:
    """Describe what mixed precision gained over the first run, if it gained anything."""
    (first, reference), *others = results.items()
    fastest, fast = min(others, key=lambda item: item[1].seconds)
    least, small = min(others, key=lambda item: item[1].peak_bytes)
    gain = reference.seconds / fast.seconds
    share = small.peak_bytes / reference.peak_bytes
    if gain > 1.05:
        sentences = [f"{fastest} is {gain:.2f} times as fast as {first} on this {device}."]
    else:
        sentences = [
            f"Mixed precision does not save time on this {device}: the fastest of its runs, "
            f"{fastest}, takes {1 / gain:.2f} times as long as {first}."
        ]
    if device == "cpu" and reference.peak_bytes - small.peak_bytes < EXACT:
        sentences.append(
            f"The memory cannot be compared: on a CPU, differences of less than {EXACT >> 20} MiB "
            f"are those of the process, not of the model."
        )
    elif share < 0.95:
        sentences.append(f"{least} takes {share:.0%} of the memory.")
    else:
        sentences.append(f"Mixed precision saves no memory: {least} takes {share:.0%} of it.")
    return " ".join(sentences)


def headline(results: Mapping[str, Figures]) -> str:
    """Return the heading of a picture: time and memory of ampfuse and of the first run."""
    (first, reference), *_ = results.items()
    ours = results[AMPFUSE]
    return (
        f"{AMPFUSE} trains {reference.seconds / ours.seconds:.2f} times as fast as {first}, "
        f"in {ours.peak_bytes / reference.peak_bytes:.0%} of its memory"
    )


def bars(axes: Any, values: Mapping[str, float], title: str, number: str) -> None:
    """Draw a bar for each run, with its number in the given format."""
    drawn = axes.barh([*values], [*values.values()], color=[COLORS[name] for name in values])
    axes.bar_label(drawn, fmt=number, padding=3)
    axes.margins(x=0.2)
    axes.set_title(title)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
