"""Runs the first steps of a program in one precision, and writes what was measured to a file."""

import ctypes
import json
import random
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as hooks_of_optimizers

from ampfuse._graphs import uses_gpu
from ampfuse._measuring import only_measures
from ampfuse._nested import params_of, stored_tensors_in
from ampfuse._program_lines import Place
from ampfuse._replacing import replace
from ampfuse.amp import GradScaler
from ampfuse.command import program
from ampfuse.diagnosis._clock import StepClock
from ampfuse.diagnosis._phases import INPUT, Listener
from ampfuse.patching import patch
from ampfuse.patching._scalers import RECORDING
from ampfuse.precision._forcing import Forcing, calling_line
from ampfuse.precision._modules import Modules
from ampfuse.precision._operators import OperatorWatch
from ampfuse.precision._precisions import ANALYSED, PRECISIONS, Precision
from ampfuse.precision._samples import Samples
from ampfuse.precision._scaling import Scaling

WARMING_UP = 2  # steps after them
SEED = 1


class Trial(Listener):
    """Measures a program that runs in one precision until it has taken its steps."""

    def __init__(
        self,
        exits: ExitStack,
        precision: Precision,
        steps: int,
        backwards: int | None,
        scale: float,
    ) -> None:
        self.precision = precision
        self.losses: list[Tensor] = []
        self.backward: Place | None = None
        self.step: Place | None = None
        self.times: list[float] = []
        self.input_times: list[float] = []
        self.inputs: float | None = None
        self.weights: float | None = None
        self._steps = steps
        self._backwards = backwards  # of all steps, which are as many if no step is skipped
        self._first_timed: int | None = None
        self._scaler: GradScaler | None = None  # that has scaled the next loss
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
        replace(exits, torch.autograd, "backward", self._measured(torch.autograd.backward))
        replace(exits, GradScaler, "scale", self._noting_scale(GradScaler.scale))
        for handle in (
            hooks_of_optimizers.register_optimizer_step_pre_hook(self._enter_optimizer),
            hooks_of_optimizers.register_optimizer_step_post_hook(self._leave_optimizer),
        ):
            exits.callback(handle.remove)
        self._memory = Memory()

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """Note the times of a step, and end the program after the last one."""
        if uses_gpu():
            torch.cuda.synchronize()
        if self._first_timed is not None and step > self._first_timed:
            self.times.append(sum(seconds.values()))
            self.input_times.append(seconds[INPUT])
        elif self._first_timed == step:
            self._memory.begin()

    def result(self) -> dict[str, Any]:
        """Return what was measured, for JSON."""
        places = {
            "model": self.modules.first_call,
            "backward": self.backward,
            "step": self.step,
            "autocast": self.forcing.autocast,
            "scaler": self.forcing.scaler,
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
            "peak": self._memory.peak(),
            "skipped": skipped,
            "scale": scale,
            "inputs": self.inputs,
            "weights": self.weights,
            "gpu": torch.cuda.get_device_name() if uses_gpu() else None,
            "capability": torch.cuda.get_device_capability() if uses_gpu() else None,
            "operators": vars(self.watch.found),
            "own_dtype": str(self.forcing.dtype).removeprefix("torch."),
            "own_16bit": self._own_16bit(),
            "converted": self.forcing.converted,
            "roots": [type(root).__name__ for root in self.modules.roots],
            "places": {name: at and at._asdict() for name, at in places.items()},
            "error": self.clock.error and repr(self.clock.error),
        }

    def _measured(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return torch's backward with what is measured around it."""

        @wraps(call)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            is_nested = torch._C._current_graph_task_id() >= 0
            is_elsewhere = threading.get_ident() != self._thread
            if torch.compiler.is_compiling() or is_nested or is_elsewhere:
                call(tensors, grad_tensors, *args, **kwargs)
                return
            if len(self.losses) == self._backwards:
                raise program.DoneError
            self.forcing.end()
            self.backward = self.backward or calling_line()
            scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            self._scaler = None
            self._note_loss(tensors, scale)
            if self._first_timed is None:
                self.samples.begin_backward()
            scaling = self._own_scaling()
            if scaling is not None:
                tensors, grad_tensors = scaling.begin(tensors, grad_tensors, self._params())
            call(tensors, grad_tensors, *args, **kwargs)
            self.watch.rests = True
            if scaling is not None:
                scaling.end(self._params())
            self._after_backward(scale)

        return backward

    def _note_loss(self, tensors: Any, scale: float) -> None:
        loss = tensors if isinstance(tensors, Tensor) else tensors[0]
        self.losses.append(loss.detach().sum(dtype=torch.float32) / scale)

    def _after_backward(self, scale: float) -> None:
        if self._first_timed is not None:
            return
        self.samples.end_backward(scale)
        self.modules.forget()

    def _end_analysis(self) -> None:
        # Not in backward(), which torch calls by a mode that has to end later than this.
        if self._first_timed is None and len(self.losses) >= ANALYSED:
            self._analysis.close()
            self.modules.on_output = None
            self._first_timed = self.clock.steps + 1 + WARMING_UP

    def _noting_scale(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def scale(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            self._scaler = scaler if scaler.is_enabled() else None
            return call(scaler, *args, **kwargs)

        return scale

    def _own_16bit(self) -> str:
        """Return the dtype of 16-bit parameters that the program has made itself."""
        dtypes = {str(one.dtype) for one in self._params()} if not self.forcing.converted else set()
        return min((one for one in dtypes if one.endswith("float16")), default="")

    def _own_scaling(self) -> Scaling | None:
        """Return what scales the losses of a program that has no scaler, or None."""
        return None if self.forcing.has_scaler else self.scaling

    def _params(self) -> list[Tensor]:
        return list(self.modules.parameters().values())

    def _begin_root(self, module: nn.Module, inputs: Any) -> None:
        """Note sums by which one sees whether two runs have the same weights and batches."""
        self._end_analysis()
        self.watch.rests = not torch.is_grad_enabled()
        if self.inputs is None and torch.is_grad_enabled():
            self.watch.rests = True
            self.weights = sum(float(one.detach().double().sum()) for one in self._params())
            self.inputs = sum(float(one.double().sum()) for one in stored_tensors_in(inputs))
            self.watch.rests = False

    @only_measures
    def _enter_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self.forcing.end()
        self.watch.rests = True
        self._end_analysis()
        self.step = self.step or calling_line()
        if (scaling := self._own_scaling()) is not None:
            scaling.hide_overflow(params_of(optimizer))

    @only_measures
    def _leave_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self.scaling is not None:
            self.scaling.restore()
        if self.clock.steps >= self._steps:
            raise program.DoneError


class Memory:
    """The peak of memory: of tensors on a GPU, or of this process beyond its start."""

    def __init__(self) -> None:
        self._start = _status().get("RssAnon", 0)

    def begin(self) -> None:
        """Forget the peak until now."""
        if uses_gpu():
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # give back what the analysis has freed
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int | None:
        """Return the peak in bytes, or None if it is not known."""
        if uses_gpu():
            return torch.cuda.max_memory_allocated()
        now = _status()
        if "VmHWM" not in now or "RssFile" not in now:
            return None
        return now["VmHWM"] - now["RssFile"] - now.get("RssShmem", 0) - self._start


def _status() -> dict[str, int]:
    """Return the sizes that the kernel reports on this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines if line.endswith(" kB"))
    return {name: int(size.split()[0]) * 1024 for name, size in pairs}


def seed() -> None:
    """Seed the random numbers of programs that do not seed them, alike in all runs."""
    random.seed(SEED)
    torch.manual_seed(SEED)
    with suppress(ImportError):
        import numpy

        numpy.random.seed(SEED)


def main(order: dict[str, Any]) -> None:
    """Run a program as ordered, and write the result to files in a folder."""
    precision = PRECISIONS[order["precision"]].keeping(order["kept"])
    RECORDING.history = 2**16
    patch()
    seed()
    folder = Path(order["folder"])
    run = program.run_module if order["is_module"] else program.run_script
    name, *arguments = order["words"]
    with ExitStack() as exits:
        exits.enter_context(program.saved_in_memory())
        trial = Trial(exits, precision, order["steps"], order["backwards"], order["scale"])
        try:
            raised = run(name, arguments)
        except program.NoProgramError as error:
            raised = error
        result = trial.result()
    is_done = isinstance(raised, program.DoneError)
    is_exit = isinstance(raised, SystemExit)
    result["failure"] = None if raised is None or is_done or is_exit else how_it_failed(raised)
    torch.save([trial.samples.gradients, trial.samples.outputs], folder / "samples.pt")
    (folder / "result.json").write_text(json.dumps(result))


def how_it_failed(error: BaseException) -> str:
    """Describe an exception and the program's line that raised it."""
    import traceback

    lines = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and "ampfuse" not in frame.filename
    ]
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}" + (f" ({lines[-1]})" if lines else "")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
