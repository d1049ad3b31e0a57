"""Precisions in which a program is tried, and the measurements in one of them."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from ampfuse._texts import drop_numbers
from ampfuse.tools.precision.samples import Gradients, Outputs

FIRST_SCALE = 65536.0  # the default of torch's GradScaler
ANALYSED = 4  # calls of backward that are compared; two models that train in turn have two each


@dataclass(frozen=True)
class Precision:
    """How a program computes."""

    name: str
    dtype: torch.dtype | None = None
    """The dtype of autocast, or None for float32."""
    is_scaled: bool = False
    """True if the loss is multiplied by a scale before backward."""
    kept: tuple[str, ...] = ()
    """The names of modules that compute in float32 nevertheless."""

    def __str__(self) -> str:
        """Return its name with the modules that stay in float32."""
        kinds = ", ".join(map(kind_of, self.kept))
        return f"{self.name}, with {kinds} in float32" if kinds else self.name

    def keeping(self, module: str) -> "Precision":
        """Return this precision, but with one more module in float32."""
        return replace(self, kept=(*self.kept, module))

    def keeps(self, module: str) -> bool:
        """Return True for modules that stay in float32, and for those that are repeated like them.

        With `"layers.0.norm"`, these are the norms of all layers.
        """
        return kind_of(module) in map(kind_of, self.kept)


def kind_of(module: str) -> str:
    """Return a name for all modules that are repeated like this one."""
    kind = drop_numbers(module)
    return module if kind == "*" else kind


FLOAT32 = Precision("float32")
BFLOAT16 = Precision("bfloat16", torch.bfloat16)
FLOAT16 = Precision("float16 with a scaler", torch.float16, is_scaled=True)
UNSCALED = Precision("float16 without a scaler", torch.float16)


class Overflow(NamedTuple):
    """An operator that made a NaN or an infinity of finite values in forward."""

    module: str
    operator: str
    where: str
    """File and line, as in `"train.py:12"`."""


@dataclass
class Outcome:
    """The measurements of a program that ran in one precision."""

    precision: Precision
    failure: str | None = None
    """How the program failed, or None."""
    steps: int = 0
    losses: list[float] = field(default_factory=list)
    """The loss of each backward."""
    last_loss: float | None = None
    """The last loss, which is that of the whole batch if `accumulate` has computed it."""
    seconds: list[float] = field(default_factory=list)
    """The times of steps."""
    peak: int | None = None
    """The peak of memory in bytes, which is known on a GPU only."""
    skipped: int = 0
    """Steps that were skipped, since scaled gradients were not finite."""
    inputs: float | None = None
    """The sum of the first batch. Runs that can be compared have the same."""
    weights: float | None = None
    """The sum of the first module's weights."""
    gpu: str | None = None
    overflows: list[Overflow] = field(default_factory=list)
    """In their order, each operator of a module once."""
    largest_in_backward: float = 0.0
    """The largest finite value of an operator that computes in 16 bits, in backward."""
    autocasts: dict[str, str] = field(default_factory=dict)
    """The lines that enable autocast, each with the dtype that the program gives to it."""
    dtypes: list[str] = field(default_factory=list)
    """The dtypes of the program's parameters."""
    is_compiled: bool = False
    roots: list[str] = field(default_factory=list)
    """The classes of the outermost modules."""
    places: dict[str, str] = field(default_factory=dict)
    """The first lines that call the `model`, `backward` and `step`, and make a `scaler`. Also those
    that make an autocast that is `off` outside of modules, in a program that enables none, or that
    is disabled for a part of the program, which stays in `float32`."""
    gradients: list[Gradients] = field(default_factory=list)
    outputs: Outputs = field(default_factory=dict)

    @property
    def milliseconds(self) -> float | None:
        """The time of a step: the median."""
        return 1e3 * median(self.seconds) if self.seconds else None

    @cached_property
    def is_finite(self) -> bool:
        """True if all losses and gradients are finite."""
        gradients = (taken for one in self.gradients for taken, _ in one.values())
        return all(map(math.isfinite, self.losses)) and all(map(is_finite, gradients))


def is_finite(tensor: Tensor) -> bool:
    """Return True if no element is NaN or infinite."""
    return bool(tensor.isfinite().all())
