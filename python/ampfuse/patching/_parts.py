"""What of torch can be replaced, and whether it is."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch

from ampfuse.patching import _clipping, _losses, _optimizers, _scalers
from ampfuse.patching._references import exchange
from ampfuse.patching._usage import Usage

_lock = RLock()


class Part:
    """Names of torch's that are replaced together, for as long as somebody wants it.

    That is from `patch()` until `unpatch()`, and inside of `patched()` blocks, however many there
    are and on whatever threads.
    """

    def __init__(self, usage: Usage) -> None:
        self.name = usage.part
        self.usage = usage
        self.is_patched = False
        self.blocks = 0
        self.is_bound = False
        self.pairs: list[tuple[Any, Any]] = []  # torch's, and what stands in for it
        self._homes: list[tuple[str, str]] = []  # modules of torch's, and the names there

    def replace(self, original: Any, stand_in: Any, modules: Iterable[str]) -> None:
        """Have `stand_in` take the place of what these modules define or hand on."""
        self.pairs.append((original, stand_in))
        self._homes += [(module, original.__name__) for module in modules]

    def is_on(self) -> bool:
        """Whether anybody wants it; what outlives that is torch's again."""
        return self.is_patched or self.blocks > 0

    def exchange_at_home(self, pairs: list[tuple[Any, Any]]) -> None:
        """In torch's own modules."""
        for module_name, name in self._homes:
            module = sys.modules[module_name]
            for old, new in pairs:
                if vars(module).get(name) is old:
                    setattr(module, name, new)


def _parts() -> Iterator[Part]:
    scaler = Part(_scalers.USAGE)
    for original, ours in _scalers.KINDS:
        home = original.__module__
        modules = [home, home.removesuffix(".grad_scaler")]
        if original is torch.GradScaler:
            modules.append("torch")
        made = _scalers.stand_in(original, ours, scaler.is_on)
        scaler.replace(original, made, modules)
    yield scaler
    optimizers = Part(_optimizers.USAGE)
    for cls in _optimizers.CLASSES:
        made = _optimizers.stand_in(cls, optimizers.is_on)
        optimizers.replace(made.original, made, [made.original.__module__, "torch.optim"])
    yield optimizers
    loss = Part(_losses.USAGE)
    loss.replace(_losses.original, _losses.stand_in(loss.is_on), ["torch.nn.functional"])
    yield loss
    clipping = Part(_clipping.USAGE)
    modules = ["torch.nn.utils.clip_grad", "torch.nn.utils"]
    clipping.replace(_clipping.original, _clipping.stand_in(clipping.is_on), modules)
    yield clipping


PARTS: dict[str, Part] = {part.name: part for part in _parts()}


def chosen(names: Iterable[str], without: Iterable[str]) -> list[Part]:
    """Those of these names, or all, but for those `without`."""
    names, without = list(names), [without] if isinstance(without, str) else list(without)
    for name in (*names, *without):
        if not isinstance(name, str):
            raise TypeError(f"expected parts as arguments of their own, got {name!r}")
        if name not in PARTS:
            raise ValueError(f"expected parts among {', '.join(PARTS)}, got {name!r}")
    return [PARTS[name] for name in names or PARTS if name not in without]


@contextmanager
def changing() -> Iterator[None]:
    """Make torch's names, and others' for the same, follow what is wanted behind the block."""
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
