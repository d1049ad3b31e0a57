"""The measurements of a program in one precision."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import NamedTuple

from torch import Tensor

from ampfuse.tools.precision.precisions import Precision
from ampfuse.tools.precision.samples import Gradients, Outputs


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
    own_dtype: str = ""
    """The dtype that the program gives to autocast, if it uses autocast."""
    dtypes: list[str] = field(default_factory=list)
    """Of the program's parameters."""
    is_compiled: bool = False
    roots: list[str] = field(default_factory=list)
    """The classes of the outermost modules."""
    places: dict[str, str] = field(default_factory=dict)
    """The first lines that call the `model`, `backward` and `step`, enable `autocast`, and make a
    `scaler`."""
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
