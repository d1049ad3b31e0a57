"""Notices what costs time or memory, or adds old gradients to new ones, in each step."""

import weakref

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse._graphs import compiled_graphs
from ampfuse._nested import params_of
from ampfuse.gradients.shards import local
from ampfuse.tools.diagnosis.phases import BACKWARD, FIRST_STEPS, Listener
from ampfuse.tools.program_lines import Place, current_line

CERTAIN = 5  # steps in a row that keep the gradients of the step before
WATCHED = 20  # steps
# The modules of optimizers that keep no masters. Others may keep some, or have an option for it.
WITHOUT_MASTERS = ("torch.optim", "ampfuse.patching")
VIEWS = ("View", "Alias", "Slice", "Select", "Clone")  # between conversion and loss
MOST_VIEWS = 4


class Habits(Listener):
    """Counts the steps in which a program does what is rarely meant."""

    is_live = True

    def __init__(self) -> None:
        self.anomaly_checks = 0
        """The number of the first steps that looked for anomalies in backward."""
        self.compilations = 0
        """Steps after the first ones in which torch.compile compiled something."""
        self.keeps_gradients = False
        """True if gradients are never set to zero."""
        self.without_gradients = ""
        """The class of the optimizer if none of its parameters has had a gradient."""
        self.rounded: torch.dtype | None = None
        """The 16-bit dtype of weights whose optimizer keeps no float32 masters."""
        self._checks_anomalies = False
        self._graphs = 0
        self._kept = 0  # steps in a row
        self._param: weakref.ref[Tensor] | None = None
        self._grad: tuple[int, int] | None = None  # id and version
        self._is_kept: bool | None = None  # None before a backward
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._has_gradients = False

    def noted(self, phase: str, begins: bool) -> None:
        """Look at the gradient before and after backward."""
        if phase == BACKWARD and begins:
            self._checks_anomalies |= torch.is_anomaly_enabled()
            self._begin_backward()
        elif phase == BACKWARD:
            self._end_backward()
            self._look_for_gradients()  # the step may free them

    def _begin_backward(self) -> None:
        """Check that something has written to the gradient since the last backward, or freed it."""
        grad = self._gradient()
        if grad is None or (id(grad), grad._version) != self._grad:
            self._is_kept = False
        elif self._is_kept is None:  # the first backward since the step
            # Programs of old set `grad.data` to zero, which has a version of its own.
            self._is_kept = self._kept < CERTAIN or bool(local(grad).count_nonzero())
            self.keeps_gradients |= self._is_kept and self._kept >= CERTAIN

    def _end_backward(self) -> None:
        """Note the version that backward has written."""
        grad = self._gradient()
        self._grad = None if grad is None else (id(grad), grad._version)

    def step_ends(self, optimizer: Optimizer, step: int, seconds: dict[str, float]) -> None:
        """Count what the step has done."""
        self.anomaly_checks += self._checks_anomalies
        self._checks_anomalies = False
        if step == 1 and type(optimizer).__module__.startswith(WITHOUT_MASTERS):
            dtypes = {param.dtype for param in params_of(optimizer)}
            self.rounded = next((dtype for dtype in DTYPES_16_BIT if dtype in dtypes), None)
        graphs = compiled_graphs()
        self.compilations += graphs > self._graphs and step > FIRST_STEPS
        self._graphs = graphs
        self.is_live = step < WATCHED
        if step <= WATCHED and not self._has_gradients:
            self._optimizer = weakref.ref(optimizer)
            self._look_for_gradients()
            is_certain = step >= CERTAIN and not self._has_gradients
            self.without_gradients = type(optimizer).__name__ if is_certain else ""
        if self.is_live and not self.keeps_gradients:
            self._kept = self._kept + 1 if self._is_kept else 0
            self._watch(optimizer)

    def _look_for_gradients(self) -> None:
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is not None and not self._has_gradients:
            self._has_gradients = any(param.grad is not None for param in params_of(optimizer))

    def _watch(self, optimizer: Optimizer) -> None:
        """Watch the first gradient until the next step."""
        self._param = None
        for param in params_of(optimizer):
            if param.grad is not None:
                self._param = None if param.grad.is_sparse else weakref.ref(param)
                break
        self._is_kept = None
        self._end_backward()

    def _gradient(self) -> Tensor | None:
        param = None if self._param is None else self._param()
        return None if param is None else param.grad


class WideLogits:
    """Remembers the largest logits that were converted."""

    def __init__(self) -> None:
        self.bytes = 0
        self.dtype: torch.dtype | None = None
        """The dtype before the conversion."""
        self.place: Place | None = None

    def __call__(self, logits: Tensor) -> None:
        """Look at the logits of a loss."""
        if logits.dtype != torch.float32 or logits.nbytes <= self.bytes:
            return
        dtype = dtype_before(logits)
        if dtype in DTYPES_16_BIT:
            self.bytes, self.dtype = logits.nbytes, dtype
            self.place = current_line()


def dtype_before(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype from which a tensor was converted, if autograd knows it."""
    node = tensor.grad_fn
    for _ in range(MOST_VIEWS + 1):
        if node is None:
            return None
        source = node.next_functions[0][0] if node.next_functions else None
        if node.name() == "ToCopyBackward0":
            return None if source is None else source._input_metadata[0].dtype
        if not node.name().removesuffix("Backward0").endswith(VIEWS):
            return None
        node = source
    return None
