"""Measures where the time of training steps goes, without a change to the program.

A clock is in one phase at a time. It notes the phases by hooks of optimizers and by replacing a
few functions of torch, which takes some microseconds per step. Modules get no hooks: torch.compile
would compile a model again when they change.
"""

import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as hooks_of_optimizers
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampfuse._measuring import only_measures
from ampfuse.amp import GradScaler

INPUT = "input"  # waiting for the next batch
FORWARD = "forward"  # from a batch until backward, so with the loss
BACKWARD = "backward"
OPTIMIZER = "optimizer"
SCALER = "scaler"
OTHER = "other"  # of the program
PHASES = (INPUT, FORWARD, BACKWARD, OPTIMIZER, SCALER, OTHER)

SCALER_METHODS = ("unscale_", "step", "update", "clip_grad_norm_")


@dataclass(frozen=True)
class Loader:
    """The options of a DataLoader, and how long the program has waited for it."""

    workers: int
    persistent_workers: bool
    waits: list[float] = field(default_factory=list)
    """Seconds for each batch."""
    starts: list[float] = field(default_factory=list)
    """Seconds until an iterator was made, for each epoch."""


class StepClock:
    """Measures the steps of a program while it is entered."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        """Seconds by phase of each step. A step ends when the first optimizer has stepped."""
        self.loaders: list[Loader] = []
        self._stack = [OTHER]
        self._last = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._thread = threading.get_ident()
        self._first: weakref.ref[Optimizer] | None = None
        self._of_loader: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
        self._exits = ExitStack()

    def __enter__(self) -> "StepClock":
        """Begin to measure."""
        hooks = [
            hooks_of_optimizers.register_optimizer_step_pre_hook(self._enter_optimizer),
            hooks_of_optimizers.register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        for hook in hooks:
            self._exits.callback(hook.remove)
        self._replace(torch.autograd, "backward", self._in_phase(BACKWARD))
        for name in SCALER_METHODS:
            self._replace(GradScaler, name, self._in_phase(SCALER))
        self._replace(DataLoader, "__iter__", self._timed_start)
        self._replace(_BaseDataLoaderIter, "__next__", self._timed_next)
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop measuring."""
        self._exits.close()

    def _replace(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, change(original))
        self._exits.callback(setattr, owner, name, original)

    def _count(self) -> None:
        """Count the time since the last call for the phase that is running."""
        now = time.perf_counter()
        self._seconds[self._stack[-1]] += now - self._last
        self._last = now

    @contextmanager
    def _phase(self, phase: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        depth = len(self._stack)
        self._enter(phase)
        try:
            yield
        finally:
            self._leave(depth)

    def _enter(self, phase: str) -> None:
        self._count()
        self._stack.append(phase)

    def _leave(self, depth: int) -> None:
        """End the phases above this depth. Forward begins with a batch, and ends with any other."""
        self._count()
        ended = self._stack[depth]
        del self._stack[depth:]
        if depth == 1:
            self._stack[0] = FORWARD if ended == INPUT else OTHER

    def _in_phase(self, phase: str) -> Callable[[Any], Any]:
        def change(function: Any) -> Any:
            @wraps(function)
            def timed(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling():
                    return function(*args, **kwargs)
                with self._phase(phase):
                    return function(*args, **kwargs)

            return timed

        return change

    def _timed_start(self, function: Any) -> Any:
        @wraps(function)
        def timed(loader: Any) -> Any:
            begin = time.perf_counter()
            with self._phase(INPUT):
                iterator = function(loader)
            if loader not in self._of_loader:
                self._of_loader[loader] = Loader(loader.num_workers, loader.persistent_workers)
                self.loaders.append(self._of_loader[loader])
            self._of_loader[loader].starts.append(time.perf_counter() - begin)
            self._of_loader[iterator] = self._of_loader[loader]
            return iterator

        return timed

    def _timed_next(self, function: Any) -> Any:
        @wraps(function)
        def timed(iterator: Any) -> Any:
            begin = time.perf_counter()
            try:
                with self._phase(INPUT):
                    return function(iterator)
            finally:
                if iterator in self._of_loader:
                    self._of_loader[iterator].waits.append(time.perf_counter() - begin)

        return timed

    @only_measures
    def _enter_optimizer(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and threading.get_ident() == self._thread:
            self._enter(OPTIMIZER)

    @only_measures
    def _leave_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self._leave(len(self._stack) - 1)
        if self._first is None:
            self._first = weakref.ref(optimizer)
        if self._first() is optimizer:
            self.steps.append(dict(self._seconds))
            self._seconds.clear()
            if not self.loaders:  # the program makes its batches itself, as a part of forward
                self._stack[0] = FORWARD
