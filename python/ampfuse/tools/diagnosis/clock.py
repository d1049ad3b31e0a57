"""Measures where the time of training steps goes, without a change to the program.

Hooks of optimizers, and a few functions of torch that are replaced, only note the time at which a
phase begins or ends. The notes are read after each step. Modules get no hooks: torch.compile would
compile a model again when they change. In pauses of programs that compile nothing, only the hook
that counts steps and the functions of loaders, which workers inherit when they are forked, stay.
"""

import random
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as hooks_of_optimizers

from ampfuse._graphs import compiled_graphs, eager_only
from ampfuse.tools.diagnosis.loaders import Loader, LoaderWatch
from ampfuse.tools.diagnosis.phases import BACKWARD, OPTIMIZER, SCALER, Listener, Note, NoteReader
from ampfuse.tools.hooks import hook_backward, hook_scalers, only_measures

SCALER_METHODS = ("unscale_", "step", "update", "clip_grad_norm_")
# Measuring takes some 0.3 ms of a step that fills the caches, and 10 µs in a pause. Long programs
# are measured in runs of steps, with pauses. Runs, since workers of a loader may send several
# batches at a time; pauses of different lengths, since programs do some things every 100 or 256
# steps.
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
        self._run = ExitStack()  # what is undone in a pause
        self._is_undone = True
        exits.callback(self._undo)
        handle = hooks_of_optimizers.register_optimizer_step_post_hook(self._leave_optimizer)
        exits.callback(handle.remove)
        self._loaders = LoaderWatch(exits, self.note)
        self._begin_run()

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

    def _begin_run(self) -> None:
        self._pauses = False
        if not self._is_undone:
            return
        self._is_undone = False
        handle = hooks_of_optimizers.register_optimizer_step_pre_hook(self._enter_optimizer)
        self._run.callback(handle.remove)
        hook_backward(self._run, partial(self._noted, BACKWARD))
        hook_scalers(self._run, partial(self._noted, SCALER), *SCALER_METHODS)

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
    @eager_only
    def _enter_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self.note(OPTIMIZER, True, id(optimizer))

    @only_measures
    @eager_only
    def _leave_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.note(OPTIMIZER, False, id(optimizer))
        if not self._is_first(optimizer):
            return
        self.steps += 1
        try:
            if not self._pauses:
                self._end_step(optimizer)
            if self.steps >= self._changes_at:
                self._resume() if self._pauses else self._pause()
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

    # A compiled function that contains what is replaced here would be compiled again if it changed,
    # so what is replaced stays in pauses, and a pause in which it was undone does not end.

    def _pause(self) -> None:
        if any(listener.needs_next_step for listener in self._listeners):
            return
        self._changes_at = self.steps + self._random.randint(*PAUSES)
        self._pauses = True
        if not compiled_graphs():
            self._undo()
        self._note_pause()

    def _resume(self) -> None:
        if self._is_undone and compiled_graphs():
            self._changes_at = sys.maxsize
            return
        self._changes_at = self.steps + RUN
        self._reader = NoteReader()
        self._begin_run()
        self._note_pause()

    def _note_pause(self) -> None:
        self._loaders.pauses = self._pauses
        for listener in self._listeners:
            listener.pauses(self._pauses)

    def _undo(self) -> None:
        self._pauses = self._is_undone = True
        self._run.close()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._pauses, self._changes_at = True, sys.maxsize
        self._notes.clear()
