"""The parts of torch that can be replaced, and whether they are replaced at present."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from ampfuse._arguments import suggestion
from ampfuse.patching import clipping, losses, optimizers, scalers
from ampfuse.patching._references import exchange
from ampfuse.patching._usage import Usage

_lock = RLock()


class Part:
    """Objects of torch that are replaced together.

    They are replaced from `patch()` until `unpatch()`, and while any thread is inside of a
    `patched()` block.
    """

    def __init__(self, usage: Usage) -> None:
        self.name = usage.part
        self.usage = usage
        self.is_patched = False
        self.blocks = 0
        self.is_bound = False
        self.pairs: list[tuple[Any, Any]] = []  # (torch's object, its replacement)
        self._homes: list[tuple[str, str]] = []  # (module of torch's, name in it)

    def register(self, original: Any, replacement: Any, modules: Iterable[str]) -> None:
        """Register a replacement of an object that these modules define or re-export."""
        self.pairs.append((original, replacement))
        self._homes += [(module, original.__name__) for module in modules]

    def is_on(self) -> bool:
        """Return True while the part is patched. Later, its replacements act as torch's objects."""
        return self.is_patched or self.blocks > 0

    def exchange_at_home(self, pairs: list[tuple[Any, Any]]) -> None:
        """Exchange the objects in torch's own modules."""
        for module_name, name in self._homes:
            module = sys.modules[module_name]
            for old, new in pairs:
                if vars(module).get(name) is old:
                    setattr(module, name, new)


def _parts() -> Iterator[Part]:
    scaler = Part(scalers.USAGE)
    for original, ours in scalers.KINDS:
        home = original.__module__
        modules = [home, home.removesuffix(".grad_scaler")]
        if original is torch.GradScaler:
            modules.append("torch")
        made = scalers.replacement(original, ours, scaler.is_on)
        scaler.register(original, made, modules)
    yield scaler
    optimizer = Part(optimizers.USAGE)
    for cls in optimizers.CLASSES:
        made = optimizers.replacement(cls, optimizer.is_on)
        optimizer.register(made.original, made, [made.original.__module__, "torch.optim"])
    yield optimizer
    loss = Part(losses.USAGE)
    loss.register(losses.original, losses.replacement(loss.is_on), ["torch.nn.functional"])
    yield loss
    clip = Part(clipping.USAGE)
    modules = ["torch.nn.utils.clip_grad", "torch.nn.utils"]
    clip.register(clipping.original, clipping.replacement(clip.is_on), modules)
    yield clip


PARTS: dict[str, Part] = {part.name: part for part in _parts()}


def chosen(names: Iterable[str], without: Iterable[str]) -> list[Part]:
    """Return the parts of these names (all if there is no name), except those in `without`."""
    names, without = list(names), [without] if isinstance(without, str) else list(without)
    for name in (*names, *without):
        if not isinstance(name, str):
            raise TypeError(f"expected each part as one argument, got {name!r}")
        if name not in PARTS:
            raise ValueError(
                f"expected parts among {', '.join(PARTS)}, got {name!r}{suggestion(name, PARTS)}"
            )
    return [PARTS[name] for name in names or PARTS if name not in without]


@contextmanager
def changing() -> Iterator[None]:
    """After the block, rebind names in torch and in other modules as the parts then require."""
    with _lock:
        yield
        changed = [part for part in PARTS.values() if part.is_on() != part.is_bound]
        pairs: list[tuple[Any, Any]] = []
        for part in changed:
            part.is_bound = part.is_on()
            own = part.pairs if part.is_bound else [(new, old) for old, new in part.pairs]
            part.exchange_at_home(own)
            pairs += own
        if pairs:
            exchange(pairs)
