"""`account`: a breakdown of the peak memory of a training step."""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from ampfuse._nested import params_of
from ampfuse._texts import drop_numbers, size_text
from ampfuse.tools.memory.record import KINDS, Kind, Record
from ampfuse.tools.memory.recorder import Recorder
from ampfuse.tools.memory.restoring import restore_optimizer, unchanged
from ampfuse.tools.memory.under_autocast import is_in_float32, under_autocast
from ampfuse.tools.memory.what_if import ALL, CHANGES, COMBINED

MODULES_SHOWN = 8
LEAST_SAVING = 0.01  # of the peak; changes that save less are not shown


@dataclass(frozen=True)
class Saving:
    """The memory of the step after a change of the program."""

    name: str
    how: str
    peak: int
    """Bytes at the peak after this change alone."""
    kinds: dict[str, int]
    """The same by kind of tensors."""


@dataclass(frozen=True)
class Account:
    """The memory of a training step at its peak, in bytes, and what it is for."""

    device: str
    """`"cuda"` or `"cpu"`: the device that the account is about."""
    peak: int
    phase: str
    """`"forward"`, `"backward"` or `"optimizer step"`: where the peak is."""
    kinds: dict[str, int]
    """The peak by kind of tensors, for example `"parameters"`."""
    modules: dict[str, int]
    """The activations at the peak by the module that computed them."""
    savings: list[Saving]
    """Changes of the program, and the peak after each of them."""
    unknown: list[str]
    """Lines whose results have shapes that depend on numbers, which the account cannot know."""

    def __str__(self) -> str:
        """Return the account as a table of plain text."""
        lines = [self._title()]
        for kind, size in self.kinds.items():
            lines.append(f"  {kind:<28}{size_text(size):>12}{size / self.peak:>7.0%}")
        modules: Counter[str] = Counter()  # layers that differ in numbers alone are one row
        for name, size in self.modules.items():
            modules[drop_numbers(name) or "outside modules"] += size
        if modules:
            title = "activations at the peak, by the module that computed them"
            outside = " (outside modules: the loss, and other functions)"
            lines.append(title + (outside if modules["outside modules"] else ""))
        shown = dict(modules.most_common(MODULES_SHOWN))
        shown["others"] = modules.total() - sum(shown.values())
        lines += [f"  {name:<28}{size_text(size):>12}" for name, size in shown.items() if size]
        savings = self._large_savings()
        if savings:
            lines.append("the peak after one change of the program")
        for one in savings:
            change = f"{size_text(one.peak):>12}{one.peak / self.peak - 1:>+7.0%}"
            lines.append(f"  {one.name:<28}{change}  {one.how}".rstrip())
        if self.unknown:
            lines.append("shapes that depend on numbers are unknown, and the peak may be larger:")
            lines += [f"  {one}" for one in self.unknown]
        return "\n".join(lines)

    def _title(self) -> str:
        place = "GPU" if self.device == "cuda" else "CPU"
        return f"peak of a training step on a {place}: {size_text(self.peak)}, in {self.phase}"

    def _large_savings(self) -> list[Saving]:
        large = [one for one in self.savings if one.peak < self.peak * (1 - LEAST_SAVING)]
        these = [one for one in large if one.name in COMBINED]
        return large if len(these) > 1 else [one for one in large if one.name != ALL.name]

    def plot(self, path: str | Path) -> None:
        """Draw the account and its savings as stacked bars. This needs matplotlib.

        Args:
            path: The picture's file; its ending chooses the format.
        """
        from matplotlib.figure import Figure

        bars = {"as it is": self.kinds} | {one.name: one.kinds for one in self._large_savings()}
        figure = Figure(figsize=(9, 1.2 + 0.42 * len(bars)), layout="constrained")
        axes = figure.add_subplot(title=self._title(), xlabel="MiB")
        ends = [0.0] * len(bars)
        for kind in KINDS:
            sizes = [kinds.get(kind, 0) / 2**20 for kinds in bars.values()]
            if any(sizes):
                axes.barh(list(bars), sizes, left=ends, color=f"C{KINDS.index(kind)}", label=kind)
                ends = [end + size for end, size in zip(ends, sizes, strict=True)]
        for row, end in enumerate(ends):
            axes.text(end, row, f" {size_text(end * 2**20)}", va="center", fontsize=8)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.15 * max(ends))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        figure.savefig(path, dpi=150)


def account(
    model: nn.Module, optimizer: Optimizer, step: Callable[[], object], *, device: str = "cuda"
) -> Account:
    """Return what the memory of a training step is for.

    Operators compute shapes, but no numbers, so this takes a second and no memory, and it leaves
    model and optimizers as they are.

    Args:
        model: The model, on the CPU.
        optimizer: The optimizer that `step` steps.
        step: A function that runs forward, backward and `optimizer.step()`. It is called twice, and
            in float32 once more under autocast.
        device: What the account is about: `"cuda"`, or `"cpu"` for a program that trains on a CPU.

    Returns:
        The account of the second step.

    Raises:
        TypeError: `model` or `optimizer` is something else.
        ValueError: The model is on a GPU or not initialized, or `step` does not step the optimizer.

    Examples:
        >>> import torch, ampfuse.memory
        >>> model = torch.nn.Linear(1024, 1024)
        >>> optimizer = ampfuse.AdamW(model.parameters())
        >>> def step():
        ...     model(torch.zeros(8, 1024)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> ampfuse.memory.account(model, optimizer, step).kinds["gradients"]
        4198400
    """
    return account_of(*recorded(model, optimizer, step, device, may_autocast=True))


def recorded(
    model: nn.Module,
    optimizer: Optimizer,
    step: Callable[[], object],
    device: str,
    may_autocast: bool = False,
) -> list[Record]:
    """Return the record of the second of two steps, and perhaps of a third one under autocast."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer: expected an Optimizer, got {type(optimizer).__name__}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'cuda' or 'cpu', got {device!r}")
    devices = {param.device.type for param in model.parameters()} - {"cpu"}
    if devices:
        raise ValueError(
            f"model: expected parameters on the CPU, got them on {min(devices)}; build the "
            "model on the CPU"
        )
    if any(map(nn.parameter.is_lazy, (*model.parameters(), *model.buffers()))):
        raise ValueError("model: expected initialized parameters: call the model once before")
    stance = torch.compiler.set_stance("force_eager")  # else torch.compile gives up on the model
    with stance, unchanged(model, optimizer) as exits, Recorder(device) as recorder:

        def meet(other: Optimizer) -> None:
            if other is not optimizer:
                restore_optimizer(exits, other)
                for param in params_of(other):  # its gradient has no numbers
                    exits.callback(setattr, param, "grad", None)

        recorder.before_first_step = meet
        recorder.note_model(model)
        for count in (1, 2):
            recorder.begin()
            step()
            if recorder.steps.get(optimizer, 0) < count:
                raise ValueError("step: expected a call of optimizer.step() in each call, got none")
        records = [recorder.record()]
        if may_autocast and is_in_float32(records[0]):
            recorder.begin()
            with suppress(Exception), under_autocast(device, recorder):  # not every step can run so
                step()
                records.append(recorder.record())
        return records


def account_of(record: Record, with_autocast: Record | None = None) -> Account:
    """Return the account of a recorded step; `with_autocast`: of another one under autocast.

    That one is compared only if its batch has the same shapes.
    """
    peak, at, kinds = _find_peak(record)
    modules: Counter[str] = Counter()
    for one in record.live_at(at):
        if record.kind_of(one) == Kind.ACTIVATIONS:
            modules[one.module] += one.bytes
    savings = []
    if with_autocast is not None and inputs_of(with_autocast) == inputs_of(record):
        changed_peak, _, changed_kinds = _find_peak(with_autocast)
        how = "torch.autocast with torch.bfloat16, around the model and the loss"
        savings.append(Saving("autocast", how, changed_peak, changed_kinds))
    for change in CHANGES:
        allocations = change.of(record)
        if allocations is not None:
            changed_peak, _, changed_kinds = _find_peak(replace(record, allocations=allocations))
            savings.append(Saving(change.name, change.how_in(record), changed_peak, changed_kinds))
    device = "cuda" if record.for_gpu else "cpu"
    return Account(device, peak, record.phase_at(at), kinds, dict(modules), savings, record.unknown)


def inputs_of(record: Record) -> Counter[torch.Size]:
    """Return the shapes of the data that modules got in a step."""
    data = (one for one in record.allocations if one.kind == Kind.DATA and one.inputs_of)
    return Counter(one.shape for one in data)


def _find_peak(record: Record) -> tuple[int, int, dict[str, int]]:
    """Return the bytes at the peak, its moment, and its bytes by kind."""
    peak, at = record.peak()
    kinds = dict.fromkeys(KINDS, 0)
    for one in record.live_at(at):
        kinds[record.kind_of(one)] += one.bytes
    return peak, at, {kind: size for kind, size in kinds.items() if size}
