"""The norms of gradients in an optimizer's first steps, which show whether they were clipped."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfuse._host_copy import HostCopy, copied_to_host
from ampfuse.gradients import _mistake_texts as texts

STEPS_WATCHED = 3

# A limit below this fraction of the scale is a mistake: a program that clips scaled gradients on
# purpose multiplies the limit by the scale.
FAR_BELOW_THE_SCALE = 1e-3


class Tolerance(NamedTuple):
    """How near the norm of clipped gradients is to the limit, and what limits are recognised.

    torch rounds the norm, and the factor that clips, to the gradients' dtype.
    """

    relative: float
    digits: int  # of the limit

    @property
    def is_fine(self) -> bool:
        """True if it is most unlikely that unclipped gradients have such norms."""
        return self.relative < 1e-4


TOLERANCES = {torch.bfloat16: Tolerance(8e-3, 1), torch.float16: Tolerance(1e-3, 2)}
TOLERANCE = Tolerance(1e-5, 2)  # of others


class StepNorm(NamedTuple):
    """The norm of an optimizer's gradients in one of its first steps, on its way to the host."""

    norm: HostCopy
    scale: HostCopy
    is_scaled: bool  # True if it is the norm of scaled gradients
    limit: float | None  # the optimizer's own
    may_guess: bool  # True if gradients with a round norm were clipped to it

    def scaled_norm(self) -> float | None:
        """Return the norm of the scaled gradients, or None if it has not arrived."""
        norm, scale = self.norm.number(), self.scale.number()
        if norm is None or scale is None:
            return None
        return norm if self.is_scaled else norm * scale


class FirstNorms:
    """The first finite norms of an optimizer's gradients."""

    def __init__(self, optimizer: Any) -> None:
        self.tolerance = tolerance_of(optimizer)
        self.steps: list[StepNorm] = []
        self.are_judged = False

    def add(
        self, norm: Tensor, scale: Tensor, is_scaled: bool, limit: float | None, may_guess: bool
    ) -> None:
        """Start copying the norm of a step to the host, with what is to be known about it."""
        copies = copied_to_host(norm), copied_to_host(scale)
        self.steps.append(StepNorm(*copies, is_scaled, limit, may_guess))

    @property
    def is_waiting(self) -> bool:
        """True if there are norms that were not judged."""
        return len(self.steps) > 0 and not self.are_judged

    def mistake(self) -> tuple[str, float, float] | None:
        """Judge the norms if all have arrived; return a text, the limit and the scale, or None."""
        arrived = [
            (norm, scale)
            for step in self.steps
            if (norm := step.scaled_norm()) is not None and (scale := step.scale.number())
        ]
        if len(arrived) < STEPS_WATCHED:
            return None
        finite = [math.isfinite(norm) for norm, _ in arrived]
        if not all(finite):  # the first scales often overflow
            self.steps = [step for step, keep in zip(self.steps, finite, strict=True) if keep]
            return None
        self.are_judged = True
        (norm, scale), *_ = arrived
        limit, tolerance = self.steps[0].limit, self.tolerance
        found = [] if limit is None else [(texts.CLIPPED_TWICE, limit)]
        if all(step.may_guess for step in self.steps):
            # Gradients that have the same round norm in each step were clipped to it.
            found.append((texts.HAVE_SAME_NORM, float(f"{norm:.{tolerance.digits}g}")))
        for text, clipped_to in found:
            if all(was_clipped(norm, clipped_to, scale, tolerance) for norm, scale in arrived):
                return text, clipped_to, scale
        return None


def tolerance_of(optimizer: Any) -> Tolerance:
    """Return the largest tolerance that the dtypes of an optimizer's parameters need."""
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    return max((TOLERANCES.get(dtype, TOLERANCE) for dtype in dtypes), default=TOLERANCE)


def was_clipped(norm: float, limit: float, scale: float, tolerance: Tolerance) -> bool:
    """Return True if gradients of this norm were clipped to this limit while they were scaled."""
    is_near = limit > 0 and abs(norm / limit - 1) < tolerance.relative
    return is_near and limit < FAR_BELOW_THE_SCALE * scale
