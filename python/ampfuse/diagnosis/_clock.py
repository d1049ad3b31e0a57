"""Measures where the time of training steps goes, without a change to the program.

Hooks of optimizers, and a few functions of torch that are replaced, only note the time at which a
phase begins or ends. The notes are read after each step. Modules get no hooks: torch.compile would
compile a model again when they change.
"""

import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as hooks_of_optimizers

from ampfuse._measuring import only_measures
from ampfuse._replacing import replace
from ampfuse.amp import GradScaler
from ampfuse.diagnosis._loaders import Loader, LoaderWatch
from ampfuse.diagnosis._phases import BACKWARD, OPTIMIZER, SCALER, Listener, Note, NoteReader

SCALER_METHODS = ("unscale_", "step", "update", "clip_grad_norm_")
# Measuring a step takes some 60 µs. Long programs are measured in runs of steps, with pauses; runs,
# since workers of a loader may send several batches at a time.
ALWAYS_MEASURED = 256  # steps
RUN = 64  # steps of each
PERIOD = 256
MOST_NOTES = 1000  # that wait to be read, for example in an evaluation of many batches


class StepClock:
    """Measures the steps of a program until `exits` closes, and calls its listeners."""

    def __init__(self, exits: ExitStack, *listeners: Listener) -> None:
        self.steps = 0
        """A step ends when the first optimizer has stepped."""
        self._listeners = listeners
        self._live = [listener for listener in listeners if listener.is_live]
        self._notes: list[Note] = []
        self._reader = NoteReader()
        self._pauses = False
        self._thread = threading.get_ident()
        self._first: weakref.ref[Optimizer] | None = None
        for hook in (
            hooks_of_optimizers.register_optimizer_step_pre_hook(self._enter_optimizer),
            hooks_of_optimizers.register_optimizer_step_post_hook(self._leave_optimizer),
        ):
            exits.callback(hook.remove)
        timed = self._noted(BACKWARD, torch.autograd.backward)
        replace(exits, torch.autograd, "backward", timed)
        for name in SCALER_METHODS:
            replace(exits, GradScaler, name, self._noted(SCALER, getattr(GradScaler, name)))
        self._loaders = LoaderWatch(exits, self.note)

    @property
    def loaders(self) -> list[Loader]:
        """The loaders that the program has used."""
        return self._loaders.loaders

    def note(self, phase: str, begins: bool, iterator: int = 0, is_exhausted: bool = False) -> None:
        """Note that a phase begins or ends now."""
        if self._pauses or threading.get_ident() != self._thread:
            return
        self._notes.append((time.perf_counter(), phase, begins, iterator, is_exhausted))
        for listener in self._live:
            listener.noted(phase, begins)
        if len(self._notes) > MOST_NOTES:
            self._read()

    def _noted(self, phase: str, function: Callable[..., Any]) -> Any:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            self.note(phase, True)
            try:
                return function(*args, **kwargs)
            finally:
                self.note(phase, False)

        return timed

    def _read(self) -> None:
        intervals = self._reader.read(self._notes)
        self._notes.clear()
        for listener in self._listeners:
            listener.read(intervals)

    @only_measures
    def _enter_optimizer(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.note(OPTIMIZER, True)

    @only_measures
    def _leave_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self.note(OPTIMIZER, False)
        if self._first is None or self._first() is None:
            self._first = weakref.ref(optimizer)
        if self._first() is not optimizer:
            return
        self.steps += 1
        if not self._pauses:
            self._read()
            seconds = self._reader.end_step()
            for listener in self._listeners:
                listener.step_ends(optimizer, self.steps, seconds)
            self._live = [listener for listener in self._listeners if listener.is_live]
        if self.steps > ALWAYS_MEASURED:
            self._pause_or_resume(self.steps % PERIOD >= RUN)

    def _pause_or_resume(self, pauses: bool) -> None:
        if self._pauses and not pauses:
            self._reader = NoteReader()
            for listener in self._listeners:
                listener.read([])  # what they have counted since belongs to no phase
        self._pauses = pauses
