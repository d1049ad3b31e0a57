"""The parts of torch that can be replaced, and whether they are replaced at present."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from types import ModuleType
from typing import Any

import torch

from ampfuse._arguments import suggestion
from ampfuse.patching import clipping, losses, optimizers, scalers
from ampfuse.patching._usage import Usage

_lock = RLock()


class Part:
    """Functions of torch that are replaced together.

    They are replaced from `patch()` until `unpatch()`, and while any thread is inside of a
    `patched()` block.
    """

    def __init__(self, usage: Usage) -> None:
        self.name = usage.part
        self.usage = usage
        self.is_patched = False
        self.blocks = 0
        self._is_bound = False
        self._pairs: list[tuple[type | None, Any, Any]] = []

    def register(self, original: Any, replacement: Any, cls: type | None = None) -> None:
        """Register the replacement of a function, or of a method of a class."""
        self._pairs.append((cls, original, replacement))

    def is_on(self) -> bool:
        """Return True while the part is patched. Later, its replacements act as torch's objects."""
        return self.is_patched or self.blocks > 0

    def bind(self) -> None:
        """Bind names to the replacements, or again to torch's functions, as the part requires."""
        if self._is_bound == self.is_on():
            return
        self._is_bound = self.is_on()
        for cls, original, replacement in self._pairs:
            old, new = (original, replacement) if self._is_bound else (replacement, original)
            name = original.__name__
            if cls is None:
                for module in list(sys.modules.values()):
                    if isinstance(module, ModuleType) and vars(module).get(name) is old:
                        vars(module)[name] = new  # setattr would ask the module
            elif vars(cls)[name] is old:
                setattr(cls, name, new)
            elif self._is_bound:
                reason = f"the program has put another {name} into the class"
                self.usage.count_fallback(f"{cls.__module__}.{cls.__qualname__}", reason)


def _parts() -> list[Part]:
    scaler, optimizer = Part(scalers.USAGE), Part(optimizers.USAGE)
    loss, clip = Part(losses.USAGE), Part(clipping.USAGE)
    scaler.register(scalers.original, scalers.constructor(scaler.is_on), torch.GradScaler)
    for cls in optimizers.CLASSES:
        optimizer.register(cls.__init__, optimizers.constructor(cls, optimizer.is_on), cls)
    loss.register(losses.original, losses.replacement(loss.is_on))
    clip.register(clipping.original, clipping.replacement(clip.is_on))
    return [scaler, optimizer, loss, clip]


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
    """After the block, bind the names of all parts as they then require."""
    with _lock:
        yield
        for part in PARTS.values():
            part.bind()
