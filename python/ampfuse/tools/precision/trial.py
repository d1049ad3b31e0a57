"""Measures the first steps of a program in one precision."""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ampfuse._graphs import compiled_graphs, is_capturing, is_in_backward, uses_gpu
from ampfuse._nested import params_of, stored_tensors_in
from ampfuse.amp import GradScaler
from ampfuse.patching.scalers import RECORDING
from ampfuse.tools.diagnosis.clock import StepClock
from ampfuse.tools.diagnosis.phases import INPUT, Listener
from ampfuse.tools.hooks import (
    hook_backward,
    hook_scalers,
    hook_steps,
    only_measures,
    replace,
)
from ampfuse.tools.memory.as_on_gpu import without_dropout
from ampfuse.tools.precision.forcing import Forcing
from ampfuse.tools.precision.modules import Modules
from ampfuse.tools.precision.operators import OperatorWatch
from ampfuse.tools.precision.precisions import ANALYSED, Precision
from ampfuse.tools.precision.samples import Samples
from ampfuse.tools.precision.scaling import Scaling
from ampfuse.tools.program_lines import Place, current_line

WARMING_UP = 2  # steps after those that are analysed
ENOUGH = 3  # timed steps of a program that is too slow
FAR_TOO_SLOW = 2.0  # times the time that is too slow


class Trial(Listener):
    """Measures a program that runs in one precision until it has taken its steps."""

    def __init__(
        self,
        exits: ExitStack,
        finish: Callable[[], NoReturn],
        precision: Precision,
        steps: int,
        backwards: int | None,
        scale: float,
        slowest: float,
    ) -> None:
        self.precision = precision
        self.losses: list[Tensor] = []
        self.backward: Place | None = None
        self.step: Place | None = None
        self.times: list[float] = []
        self.input_times: list[float] = []
        self.inputs: float | None = None
        self.weights: float | None = None
        self._finish = finish  # writes the result and ends the process
        self._steps = steps
        self._backwards = backwards  # of all steps, which are as many if no step is skipped
        self._slowest = slowest / 1e3
        self._is_slow = False
        self._last_untimed: int | None = None
        self._far_too_slow = 0  # number of steps while it warms up
        self._is_calling = False  # True while torch's backward runs
        self._scaler: GradScaler | None = None  # that has scaled losses since its last update
        self._thread = threading.get_ident()
        self.scaling = Scaling(scale) if precision.is_scaled else None
        self.clock = StepClock(exits, self)
        self.forcing = Forcing(exits, precision, scale)
        self.modules = Modules(exits, self.forcing.run)
        self.modules.on_root = self._begin_root
        self.samples = Samples(self.modules)
        self.modules.on_output = self.samples.take_output
        self.watch = OperatorWatch(self.modules)
        self._analysis = ExitStack()
        self._analysis.enter_context(torch.compiler.set_stance("force_eager"))
        self._analysis.enter_context(self.watch)
        exits.callback(self._analysis.close)
        # Attention draws other random numbers in each implementation, and so in each precision.
        attention = without_dropout(functional.scaled_dot_product_attention)
        replace(self._analysis, functional, "scaled_dot_product_attention", attention)
        hook_backward(exits, self._measured)
        hook_scalers(exits, self._noting_scale, "scale")
        hook_scalers(exits, self._noting_update, "update")
        hook_steps(exits, self._enter_optimizer, self._leave_optimizer)

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """Note the times of a step, and end the program after the last one."""
        if uses_gpu() and not is_capturing():
            torch.cuda.synchronize()
        if self._last_untimed is None:
            return
        whole = sum(seconds.values())
        is_warming_up = self._last_untimed - WARMING_UP < step <= self._last_untimed
        # If all steps that warm up are far too slow, they are enough, unless they compile. A single
        # one may evaluate the model, or save it.
        self._far_too_slow += is_warming_up and whole > FAR_TOO_SLOW * self._slowest
        is_hopeless = self._far_too_slow == WARMING_UP and not compiled_graphs()
        if step > self._last_untimed or is_hopeless:
            self.times.append(whole)
            self.input_times.append(seconds[INPUT])
            is_enough = is_hopeless or len(self.times) >= ENOUGH
            self._is_slow = is_enough and min(self.times) > self._slowest
        elif self._last_untimed == step and uses_gpu():
            torch.cuda.reset_peak_memory_stats()

    def result(self) -> dict[str, Any]:
        """Return what was measured, for JSON."""
        places = {
            "model": self.modules.first_call,
            "backward": self.backward,
            "step": self.step,
            "autocast": self.forcing.autocast,
            "scaler": self.forcing.scaler,
            "optimizer": self.forcing.optimizer[1],
        }
        scalers = list(RECORDING.scalers)
        records = [record for scaler in scalers for record in GradScaler.history(scaler)]
        ours = self.scaling
        skipped = sum(record.skipped for record in records) if scalers else ours and ours.skipped
        scale = GradScaler.get_scale(scalers[-1]) if scalers else ours and ours.scale
        return {
            "steps": self.clock.steps,
            "losses": [float(loss) for loss in self.losses],
            "seconds": self.times,
            "input_seconds": self.input_times,
            "peak": torch.cuda.max_memory_allocated() if uses_gpu() else None,
            "skipped": skipped,
            "scale": scale,
            "inputs": self.inputs,
            "weights": self.weights,
            "gpu": torch.cuda.get_device_name() if uses_gpu() else None,
            "capability": torch.cuda.get_device_capability() if uses_gpu() else None,
            "operators": vars(self.watch.found),
            "own_dtype": str(self.forcing.dtype).removeprefix("torch."),
            "dtypes": sorted({str(one.dtype) for one in self.modules.parameters().values()}),
            "compiled": compiled_graphs() > 0,
            "optimizer": self.forcing.optimizer[0],
            "roots": [type(root).__name__ for root in self.modules.roots],
            "places": {name: at and at._asdict() for name, at in places.items()},
            "error": self.clock.error and repr(self.clock.error),
        }

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
            if isinstance(tensors, Tensor):
                tensors = [tensors]
            elif not isinstance(tensors, Sequence):
                tensors = list(tensors)
            if len(self.losses) == self._backwards:
                self._finish()
            self.forcing.end()
            self.backward = self.backward or current_line()
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._note_loss(tensors, scale)
            if self._last_untimed is None:
                self.samples.begin_backward()
            scaling = self._own_scaling()
            params: list[Tensor] = []
            if scaling is not None:
                params += self.modules.parameters().values()
                tensors, grad_tensors = scaling.begin(tensors, grad_tensors, params)
            self._is_calling = True
            try:
                call(tensors, grad_tensors, *args, **kwargs)
            finally:
                self._is_calling = False
            self.watch.is_paused = True
            if scaling is not None:
                scaling.end(params)
            self._after_backward(scale)

        return backward

    def _note_loss(self, tensors: Any, scale: float) -> None:
        self.losses.append(tensors[0].detach().sum(dtype=torch.float32) / scale)

    def _after_backward(self, scale: float) -> None:
        if self._last_untimed is not None:
            return
        self.samples.end_backward(scale)
        self.modules.forget()

    def _end_analysis(self) -> None:
        # Not in backward: torch has entered a mode for it, which must be left before this one.
        is_due = self._last_untimed is None and len(self.losses) >= ANALYSED
        if is_due and not is_in_backward():
            self._analysis.close()
            self.modules.on_output = None
            self._last_untimed = self.clock.steps + 1 + WARMING_UP

    def _noting_scale(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def scale(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            self._scaler = scaler if scaler.is_enabled() else None
            return call(scaler, *args, **kwargs)

        return scale

    def _noting_update(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            self._scaler = None
            return call(scaler, *args, **kwargs)

        return update

    def _own_scaling(self) -> Scaling | None:
        """Return what scales the losses of a program that has no scaler, or None."""
        return self.scaling if self._scaler is None else None

    def _begin_root(self, module: nn.Module, inputs: Any) -> None:
        """Prepare for a root. Before the first one, note sums that are alike in comparable runs."""
        self._end_analysis()
        self.forcing.begin_root()
        if self.inputs is None:
            self.weights = sum_of(module.parameters())
            self.inputs = sum_of(stored_tensors_in(inputs))
        self.watch.is_paused = not torch.is_grad_enabled()

    @only_measures
    def _enter_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.step = self.step or current_line()
        scaling = self._own_scaling()
        if is_in_backward():
            if scaling is not None:
                raise RuntimeError("no scaler can be used if an optimizer steps in backward")
            return
        self.forcing.end()
        self.watch.is_paused = True
        self._end_analysis()
        if scaling is not None:
            scaling.hide_overflow(params_of(optimizer))

    @only_measures
    def _leave_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self.scaling is not None:
            self.scaling.restore()
        if self.clock.steps >= self._steps or self._is_slow:
            self._finish()


def sum_of(tensors: Iterable[Tensor]) -> float:
    """Return the sum of all elements."""
    return sum(float(one.detach().sum(dtype=torch.float64)) for one in tensors)
