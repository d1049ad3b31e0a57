"""Measures the first steps of a program in one precision."""

import math
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ampfuse._graphs import compiled_graphs, is_capturing, is_in_backward, uses_gpu
from ampfuse._nested import params_of, stored_tensors_in
from ampfuse.tools.hooks import FirstOptimizer, hook_functions, hook_steps, only_measures, replace
from ampfuse.tools.memory.as_on_gpu import remove_dropout
from ampfuse.tools.precision.forcing import Forcing
from ampfuse.tools.precision.modules import Modules
from ampfuse.tools.precision.operators import OperatorWatch
from ampfuse.tools.precision.outcome import ANALYSED, FIRST_SCALE, FLOAT32, Outcome, Precision
from ampfuse.tools.precision.samples import sample_first, sample_gradients, subtract
from ampfuse.tools.precision.scaling import Scaling

WARMING_UP = 2  # steps after those that are analysed
ENOUGH = 3  # timed steps of a program that is too slow


@dataclass(frozen=True)
class Program:
    """A program, how it computes, and when it ends: after the first of three limits."""

    words: list[str]
    """Its name and arguments."""
    is_module: bool
    steps: int
    backwards: float = math.inf
    """The number in float32. Programs may skip steps whose loss is not finite."""
    slowest: float = math.inf
    """The time of a step in milliseconds, after a few steps that take more."""
    precision: Precision = FLOAT32
    scale: float = FIRST_SCALE


class Trial:
    """Measures a program that runs in one precision until it has taken its steps."""

    def __init__(self, exits: ExitStack, finish: Callable[[], NoReturn], program: Program) -> None:
        self._finish = finish  # writes the outcome and ends the process
        self._program = program
        self._outcome = Outcome(program.precision)
        self._losses: list[Tensor] = []
        self._last_loss: Tensor | None = None
        self._first = FirstOptimizer()
        self._last_untimed: int | None = None
        self._end_of_step = 0.0
        self._is_calling = False  # True while torch's backward runs
        self._thread = threading.get_ident()
        self._scaling = Scaling(program.scale) if program.precision.is_scaled else None
        self._forcing = Forcing(exits, self._outcome, lambda: self._modules.running)
        self._modules = Modules(exits, self._forcing.run)
        self._modules.on_root = self._begin_root
        self._modules.on_output = self._sample_output
        self._watch = OperatorWatch(self._modules, self._outcome)
        self._analysis = ExitStack()
        self._analysis.enter_context(torch.compiler.set_stance("force_eager"))
        self._analysis.enter_context(self._watch)
        exits.callback(self._analysis.close)
        # Attention draws other random numbers in each implementation, and so in each precision.
        attention = remove_dropout(functional.scaled_dot_product_attention)
        replace(self._analysis, functional, "scaled_dot_product_attention", attention)
        hook_functions(exits, backward=self._measured, accumulate=self._accumulated)
        hook_steps(exits, self._enter_optimizer, self._leave_optimizer)

    def outcome(self, failure: str | None) -> Outcome:
        """Return what was measured."""
        self._watch.is_paused = True
        found = self._outcome
        found.failure = failure
        found.losses = [float(loss) for loss in self._losses]
        found.last_loss = None if self._last_loss is None else float(self._last_loss)
        found.skipped = self._scaling.skipped if self._scaling else 0
        if uses_gpu():
            found.gpu = torch.cuda.get_device_name()
            found.peak = torch.cuda.max_memory_allocated() if found.seconds else None
        found.dtypes = sorted({str(one.dtype) for one in self._modules.parameters().values()})
        found.is_compiled = compiled_graphs() > 0
        found.roots = [type(root).__name__ for root in self._modules.roots]
        return found

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's backward with what is measured around it."""

        @wraps(call)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            is_elsewhere = threading.get_ident() != self._thread
            # torch calls this again if a mode handles its functions.
            is_handled = self._is_calling or is_in_backward()
            if torch.compiler.is_compiling() or is_handled or is_elsewhere:
                call(tensors, grad_tensors, *args, **kwargs)
                return
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            if len(self._losses) == self._program.backwards:
                self._finish()
            self._forcing.end()
            self._forcing.note("backward")
            self._last_loss = copied(tensors[0])
            self._losses.append(self._last_loss)
            is_analysed = self._last_untimed is None
            named = self._modules.parameters() if is_analysed or self._scaling else {}
            params = list(named.values())
            before = sample_gradients(named) if is_analysed else {}
            if self._scaling is not None:
                grad_tensors = self._scaling.begin(tensors, grad_tensors, params)
            self._is_calling = True
            try:
                call(tensors, grad_tensors, *args, **kwargs)
            finally:
                self._is_calling = False
            self._watch.is_paused = True
            if self._scaling is not None:
                self._scaling.end(params)
            if is_analysed:
                self._outcome.gradients.append(subtract(sample_gradients(named), before))

        return backward

    def _accumulated(self, accumulate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `accumulate` with a note of its result: a backward has a micro-batch's share."""

        @wraps(accumulate)
        def noted(*args: Any, **kwargs: Any) -> Tensor:
            loss = accumulate(*args, **kwargs)
            self._last_loss = copied(loss)
            return loss

        return noted

    def _begin_root(self, module: nn.Module, inputs: Any) -> None:
        """Prepare for a root. Before the first one, note sums that are alike in comparable runs."""
        # Not in backward: torch has entered a mode for it, which must be left before this one.
        if self._last_untimed is None and len(self._losses) >= ANALYSED:
            self._analysis.close()
            self._last_untimed = self._outcome.steps + WARMING_UP
        torch.clear_autocast_cache()  # weights may have changed since another root ran
        if torch.is_grad_enabled() and next(module.parameters(), None) is not None:
            self._forcing.note("model")
        if self._outcome.inputs is None:
            self._outcome.weights = sum_of(module.parameters())
            self._outcome.inputs = sum_of(stored_tensors_in(inputs))
        self._watch.is_paused = not torch.is_grad_enabled()

    def _sample_output(self, name: str, inputs: Any, output: Any) -> None:
        """Sample the first input and output of a module, if no backward has run yet."""
        outputs = self._outcome.outputs
        if self._losses or name in outputs or not torch.is_grad_enabled():
            return
        taken = sample_first(output)
        if taken is not None:
            outputs[name] = sample_first(inputs), taken

    @only_measures
    def _enter_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if is_in_backward():
            raise RuntimeError("advise cannot follow an optimizer that steps during backward")
        self._forcing.note("step")
        self._forcing.end()
        self._watch.is_paused = True
        if self._scaling is not None:
            self._scaling.hide_overflow(params_of(optimizer))

    @only_measures
    def _leave_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._scaling is not None:
            self._scaling.restore()
        if self._first.matches(optimizer):
            self._outcome.steps += 1
            self._end_step()

    def _end_step(self) -> None:
        """Note the time of a step, and end the program after the last one."""
        if uses_gpu() and not is_capturing():
            torch.cuda.synchronize()
        now = perf_counter()
        steps, times = self._outcome.steps, self._outcome.seconds
        if self._last_untimed is not None and steps > self._last_untimed:
            times.append(now - self._end_of_step)
        elif steps == self._last_untimed and uses_gpu():
            torch.cuda.reset_peak_memory_stats()
        self._end_of_step = now
        is_slow = len(times) >= ENOUGH and 1e3 * min(times) > self._program.slowest
        if is_slow or steps >= self._program.steps:
            self._finish()


def copied(loss: Tensor) -> Tensor:
    """Return a copy of a loss in float32, which the program cannot change."""
    return loss.detach().sum(dtype=torch.float32)


def sum_of(tensors: Iterable[Tensor]) -> float:
    """Return the sum of all elements that are not NaN."""
    return sum(float(one.detach().nansum(dtype=torch.float64)) for one in tensors)
