"""Measures where the time of a program's first steps goes, without a change to the program.

Hooks of optimizers, and a few functions of torch that are replaced, only note the time at which a
phase begins or ends. The notes are read after each step. Modules get no hooks: torch.compile would
compile a model again when they change. For the same reason hooks and functions stay when enough
steps are measured; they do nothing then.
"""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ampfuse._graphs import eager_only
from ampfuse.amp import GradScaler
from ampfuse.optim import Mastered
from ampfuse.optim.stepping import is_ours
from ampfuse.tools.diagnosis.loaders import LoaderWatch
from ampfuse.tools.diagnosis.phases import (
    BACKWARD,
    EVALUATION,
    OPTIMIZER,
    OTHER,
    SCALER,
    Listener,
    Note,
    NoteReader,
)
from ampfuse.tools.hooks import FirstOptimizer, hook_functions, hook_steps, only_measures, replace

MEASURED = 256  # steps; measuring takes some 0.3 ms of a step that fills the caches, later 10 µs
MOST_NOTES = 1000  # that wait to be read, for example in an evaluation of many batches


class StepClock:
    """Measures the steps of a program until `exits` closes, and calls its listeners."""

    def __init__(self, exits: ExitStack, *listeners: Listener) -> None:
        self.steps = 0
        """A step ends when the first optimizer has stepped."""
        self.left_to_torch: set[str] = set()
        """The classes of torch's optimizers that stepped."""
        self.has_scaled = False
        """True if a scaler that is enabled was used."""
        self.error: Exception | None = None
        """An error of the measurements, which has ended them."""
        self._listeners = listeners
        self._live = [listener for listener in listeners if listener.is_live]
        self._notes: list[Note] = []
        self._reader = NoteReader()
        self._inner: weakref.ref[Optimizer] | None = None  # that of the last `Mastered`
        self._is_measuring = True
        self._is_switching = False  # True while a module is switched to evaluation, or back
        self._thread = threading.get_ident()
        self._first = FirstOptimizer()
        hook_steps(exits, self._enter_optimizer, self._leave_optimizer)
        kinds = {"backward": BACKWARD, "save": OTHER, "save_checkpoint": OTHER}
        noted = {kind: partial(self._noted, phase) for kind, phase in kinds.items()}
        hook_functions(exits, scale=self._noted_scaler, **noted)
        replace(exits, nn.Module, "train", self._noted_evaluation(nn.Module.train))
        self._loader_exits = exits.enter_context(ExitStack())
        self._loader_watch = LoaderWatch(self._loader_exits, self.note)
        self.loaders = self._loader_watch.loaders
        """The loaders that the program has used."""
        exits.callback(self._end)

    def note(self, phase: str, begins: bool, source: int = 0, is_exhausted: bool = False) -> None:
        """Note that a phase begins or ends now."""
        if not self._is_measuring or threading.get_ident() != self._thread:
            return
        self._notes.append((time.perf_counter(), phase, begins, source, is_exhausted))
        try:
            for listener in self._live:
                listener.noted(phase, begins)
            if len(self._notes) > MOST_NOTES:
                self._read()
        except Exception as error:  # the program must not end by it
            self._fail(error)

    def _noted(self, phase: str, function: Callable[..., Any]) -> Any:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            call = len(self._notes)  # a scaler's methods call each other
            self.note(phase, True, call)
            try:
                return function(*args, **kwargs)
            finally:
                self.note(phase, False, call)

        return timed

    def _noted_scaler(self, method: Callable[..., Any]) -> Any:
        """Return a method of a scaler with notes."""
        noted = self._noted(SCALER, method)

        @wraps(method)
        def followed(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return method(scaler, *args, **kwargs)
            self.has_scaled |= scaler.is_enabled()
            return noted(scaler, *args, **kwargs)

        return followed

    def _noted_evaluation(self, train: Callable[..., Any]) -> Any:
        """Return `Module.train` with notes: an evaluation lasts from `eval()` until `train()`."""

        @wraps(train)
        def noted(module: nn.Module, mode: bool = True) -> Any:
            is_part = self._is_switching  # of a module that is switched
            if torch.compiler.is_compiling() or is_part or module.training == mode:
                return train(module, mode)
            self.note(EVALUATION, not mode, is_exhausted=mode)
            self._is_switching = True
            try:
                return train(module, mode)
            finally:
                self._is_switching = False

        return noted

    def _read(self) -> None:
        intervals = self._reader.read(self._notes)
        self._notes.clear()
        if self._reader.training:
            self._loader_watch.note_training(self._reader.training)
            self._reader.training.clear()
        for listener in self._listeners:
            listener.read(intervals)

    @only_measures
    @eager_only
    def _enter_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if isinstance(optimizer, Mastered):
            self._inner = weakref.ref(optimizer.inner)
        elif self._is_inner(optimizer):
            return
        elif not is_ours(optimizer) and type(optimizer).__module__.startswith("torch.optim"):
            self.left_to_torch.add(type(optimizer).__name__)
        self.note(OPTIMIZER, True, id(optimizer))

    def _is_inner(self, optimizer: Optimizer) -> bool:
        """Return True if a step of `Mastered` steps this one, which is a part of that step."""
        return self._inner is not None and self._inner() is optimizer

    @only_measures
    @eager_only
    def _leave_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread or self._is_inner(optimizer):
            return
        self.note(OPTIMIZER, False, id(optimizer))
        if not self._first.matches(optimizer):
            return
        self.steps += 1
        try:
            seconds: dict[str, float] = {}
            if self._is_measuring:
                self._read()
                seconds = self._reader.end_step()
            for listener in self._listeners:
                listener.step_ends(optimizer, self.steps, seconds)
            self._live = [listener for listener in self._listeners if listener.is_live]
        except Exception as error:  # the program must not end by it
            self._fail(error)
        if self.steps == MEASURED:
            self._end()

    def _end(self) -> None:
        self._is_measuring = False
        self._notes.clear()
        self._loader_exits.close()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._listeners = ()
        self._end()
