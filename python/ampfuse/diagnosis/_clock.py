"""Measures where the time of training steps goes, without a change to the program.

Hooks of optimizers, and a few functions of torch that are replaced, only note the time at which a
phase begins or ends. The notes are read after each step. Modules get no hooks: torch.compile would
compile a model again when they change.
"""

import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer

from ampfuse._measuring import hook_steps, only_measures
from ampfuse._replacing import replace
from ampfuse.amp import GradScaler
from ampfuse.diagnosis._loaders import Loader, LoaderWatch
from ampfuse.diagnosis._phases import BACKWARD, OPTIMIZER, SCALER, Listener, Note, NoteReader

SCALER_METHODS = ("unscale_", "step", "update", "clip_grad_norm_")
# Measuring a step takes some 80 µs, and 40 µs in a pause. Long programs are measured in runs of
# steps, with pauses. Runs, since workers of a loader may send several batches at a time; pauses of
# different lengths, since programs do some things every 100 or 256 steps.
ALWAYS_MEASURED = 256  # steps
RUN = 64  # steps of each
PAUSES = (256, 768)
OTHER_STEPS = 20  # of another optimizer alone, after which its steps count
MOST_NOTES = 1000  # that wait to be read, for example in an evaluation of many batches


class StepClock:
    """Measures the steps of a program until `exits` closes, and calls its listeners."""

    def __init__(self, exits: ExitStack, *listeners: Listener) -> None:
        self.steps = 0
        """A step ends when the first optimizer has stepped."""
        self.error: Exception | None = None
        """An error of the measurements, which has ended them."""
        self._listeners = listeners
        self._live = [listener for listener in listeners if listener.is_live]
        self._notes: list[Note] = []
        self._reader = NoteReader()
        self._pauses = False
        self._changes_at = ALWAYS_MEASURED  # the step after which a pause or a run begins
        self._random = random.Random()  # its own, since the program may have seeded the other one
        self._thread = threading.get_ident()
        self._first: weakref.ref[Optimizer] | None = None
        self._steps_of_others = 0
        hook_steps(exits, self._enter_optimizer, self._leave_optimizer)
        timed = self._noted(BACKWARD, torch.autograd.backward)
        replace(exits, torch.autograd, "backward", timed)
        for name in SCALER_METHODS:
            replace(exits, GradScaler, name, self._noted(SCALER, getattr(GradScaler, name)))
        self._loaders = LoaderWatch(exits, self.note)

    @property
    def loaders(self) -> list[Loader]:
        """The loaders that the program has used."""
        return self._loaders.loaders

    def note(self, phase: str, begins: bool, source: int = 0, is_exhausted: bool = False) -> None:
        """Note that a phase begins or ends now."""
        if self._pauses or threading.get_ident() != self._thread:
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

    def _read(self) -> None:
        intervals = self._reader.read(self._notes)
        self._notes.clear()
        if self._reader.training:
            self._loaders.note_training(self._reader.training)
            self._reader.training.clear()
        for listener in self._listeners:
            listener.read(intervals)

    @only_measures
    def _enter_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self.note(OPTIMIZER, True, id(optimizer))

    @only_measures
    def _leave_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        self.note(OPTIMIZER, False, id(optimizer))
        if not self._is_first(optimizer):
            return
        self.steps += 1
        try:
            if not self._pauses:
                self._end_step(optimizer)
            if self.steps >= self._changes_at:
                self._pause_or_resume()
        except Exception as error:  # the program must not end by it
            self._fail(error)

    def _is_first(self, optimizer: Optimizer) -> bool:
        """Return True for the first optimizer, or for another one that steps alone."""
        first = None if self._first is None else self._first()
        if first is not optimizer:
            self._steps_of_others += 1
            if first is not None and self._steps_of_others < OTHER_STEPS:
                return False
            self._first = weakref.ref(optimizer)
        self._steps_of_others = 0
        return True

    def _end_step(self, optimizer: Optimizer) -> None:
        self._read()
        seconds = self._reader.end_step()
        for listener in self._listeners:
            listener.step_ends(optimizer, self.steps, seconds)
        self._live = [listener for listener in self._listeners if listener.is_live]

    def _pause_or_resume(self) -> None:
        self._pauses = not self._pauses
        if self._pauses:
            self._changes_at = self.steps + self._random.randint(*PAUSES)
            return
        self._changes_at = self.steps + RUN
        self._reader = NoteReader()
        for listener in self._listeners:
            listener.read([])  # what they have counted since belongs to no phase

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._pauses, self._changes_at = True, sys.maxsize
        self._notes.clear()
