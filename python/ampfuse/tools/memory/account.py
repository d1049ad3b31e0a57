"""`account`: a breakdown of the peak memory of a training step."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse._nested import params_of, states_of
from ampfuse._random import random_states, set_random_states
from ampfuse.tools.memory.as_on_gpu import as_on_gpu
from ampfuse.tools.memory.record import ACTIVATIONS, KINDS, Record
from ampfuse.tools.memory.recorder import Recorder
from ampfuse.tools.memory.show import plot, show, text
from ampfuse.tools.memory.what_if import CHANGES


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

    def __str__(self) -> str:
        """Return the account as a table of plain text."""
        return text(self)

    def show(self) -> None:
        """Print the account."""
        show(self)

    def as_dict(self) -> dict[str, Any]:
        """Return the account as nested dicts and lists, for example for JSON."""
        return asdict(self)

    def plot(self, path: str | Path) -> None:
        """Draw the account and its savings as stacked bars. This needs matplotlib.

        Args:
            path: The picture's file; its ending chooses the format.
        """
        plot(self, Path(path))


def account(
    model: nn.Module, optimizer: Optimizer, step: Callable[[], object], *, device: str = "cuda"
) -> Account:
    """Return what the memory of a training step is for.

    Operators compute shapes, but no numbers, so this takes a second and no memory, and it leaves
    model and optimizers as they are.

    Args:
        model: The model, on the CPU.
        optimizer: The optimizer that `step` steps.
        step: A function that runs forward, backward and `optimizer.step()`; it is called twice.
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
    return account_of(recorded(model, optimizer, step, device))


def recorded(
    model: nn.Module, optimizer: Optimizer, step: Callable[[], object], device: str
) -> Record:
    """Return the record of the second of two steps."""
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
    with stance, unchanged(model, optimizer) as exits, recording(device) as recorder:

        def meet(other: Optimizer) -> None:
            if other is not optimizer:
                exits.callback(kept_optimizer(other))
                for param in params_of(other):  # its gradient has no numbers
                    exits.callback(setattr, param, "grad", None)

        recorder.before_first_step = meet
        recorder.note_model(model)
        for count in (1, 2):
            recorder.begin()
            step()
            if recorder.steps_of(optimizer) < count:
                raise ValueError("step: expected a call of optimizer.step() in each call, got none")
        return recorder.record()


@contextmanager
def recording(device: str, after_step: Callable[[], None] | None = None) -> Iterator[Recorder]:
    """Record a dry run of the code in this block, as if it ran on the device."""
    with ExitStack() as entered, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules.*")
        recorder = Recorder(device == "cuda", after_step)
        if device == "cuda":
            entered.enter_context(as_on_gpu(recorder.sent))
        yield entered.enter_context(recorder)


def account_of(record: Record) -> Account:
    """Return the account of a recorded step."""
    peak, at, kinds = _at_peak(record)
    modules: dict[str, int] = {}
    for one in record.live_at(at):
        if record.kind_of(one) == ACTIVATIONS:
            modules[one.module] = modules.get(one.module, 0) + one.bytes
    savings = []
    for change in CHANGES:
        allocations = change.of(record)
        if allocations is not None:
            changed_peak, _, changed_kinds = _at_peak(replace(record, allocations=allocations))
            savings.append(Saving(change.name, change.how, changed_peak, changed_kinds))
    device = "cuda" if record.for_gpu else "cpu"
    return Account(device, peak, record.phase_at(at), kinds, modules, savings)


def _at_peak(record: Record) -> tuple[int, int, dict[str, int]]:
    """Return the bytes at the peak, its moment, and its bytes by kind."""
    peak, at = record.peak()
    kinds = dict.fromkeys(KINDS, 0)
    for one in record.live_at(at):
        kinds[record.kind_of(one)] += one.bytes
    return peak, at, {kind: size for kind, size in kinds.items() if size}


@contextmanager
def unchanged(model: nn.Module, optimizer: Optimizer) -> Iterator[ExitStack]:
    """Restore model, gradients, optimizer state and random numbers after this block.

    On a CPU this is for dry runs, which write to no other tensors than integers and those with one
    element. What is on a GPU is kept on the host meanwhile. The stack takes what else to restore.
    """
    params = {*model.parameters(), *params_of(optimizer)}
    with ExitStack() as exits:
        gradients = [param.grad for param in params]
        exits.callback(kept_numbers([*params, *gradients, *model.buffers()]))
        for module in model.modules():
            exits.callback(kept_attributes(module))
        for param in params:
            exits.callback(kept_parameter(param))
        exits.callback(kept_optimizer(optimizer))
        exits.callback(set_random_states, random_states())
        yield exits


def kept_numbers(values: list[Any]) -> Callable[[], None]:
    """Return a function that restores the tensors in a list that a dry run may write."""
    written = [
        one
        for one in values
        if isinstance(one, Tensor)
        and (one.device.type != "cpu" or one.numel() <= 1 or not one.is_floating_point())
        and 0 not in one.stride()  # an expanded tensor cannot be written
    ]
    numbers = [one.detach().to("cpu", copy=True) for one in written]

    def restore() -> None:
        with torch.no_grad():
            for tensor, number in zip(written, numbers, strict=True):
                tensor.copy_(number)

    return restore


def kept_attributes(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores what a module refers to, for example a table it has made."""
    attributes = {
        name: dict(value) if name in ("_buffers", "_parameters") else value
        for name, value in vars(module).items()
    }

    def restore() -> None:
        vars(module).clear()
        vars(module).update(attributes)

    return restore


def kept_parameter(param: Tensor) -> Callable[[], None]:
    """Return a function that restores a parameter's data, its gradient, and whether it has one."""
    data, gradient, is_trained = param.data, param.grad, param.requires_grad

    def restore() -> None:
        if param.data_ptr() != data.data_ptr():
            param.data = data
        if param.requires_grad != is_trained:
            param.requires_grad_(is_trained)
        param.grad = gradient

    return restore


def kept_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that restores the state and the options of an optimizer."""
    state = {
        key: dict(entries) if isinstance(entries, dict) else entries
        for key, entries in optimizer.state.items()
    }
    groups = [dict(group) for group in optimizer.param_groups]
    dicts = [*states_of(optimizer), *groups]
    numbers = kept_numbers([value for entries in dicts for value in entries.values()])

    def restore() -> None:
        numbers()
        optimizer.state.clear()
        optimizer.state.update(state)
        del optimizer.param_groups[len(groups) :]
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(values)

    return restore
