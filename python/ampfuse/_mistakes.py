"""Mistakes that raise nothing and train on wrong gradients: one warning, where they are certain.

A scaler looks for them in its first steps. What it needs to know is copied to the host without
waiting, so that on a GPU a warning may come some steps later.
"""

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from ampfuse._mirror import Mirror
from ampfuse._warning import warn_caller

STEPS_WATCHED = 3

# Whoever clips scaled gradients on purpose multiplies the limit by the scale.
FAR_BELOW_THE_SCALE = 1e-3

# More steps than one accumulated batch has parts.
TOO_MANY_STEPS = 100

CLIPPED_WHILE_SCALED = (
    "gradients were clipped to max_norm={max_norm:g} while they were still multiplied by the loss "
    "scale, {scale:g}, so that almost nothing of them is left: call "
    "scaler.clip_grad_norm_(optimizer, max_norm), or scaler.unscale_(optimizer) before clipping"
)
CLIPPED_TWICE = (
    "gradients had been clipped to {max_norm:g} before the step while they were still multiplied "
    "by the loss scale, so that almost nothing of them is left: the optimizer's "
    "max_grad_norm={max_norm:g} clips them inside the step; remove the other clipping"
)
NEVER_STEPPED = (
    "an optimizer has taken {steps} steps by optimizer.step() since a GradScaler began to scale "
    "losses, and none by scaler.step(optimizer): the gradients are still multiplied by the loss "
    "scale"
)


class Clip(NamedTuple):
    """What a gradient is marked with."""

    version: int  # of the gradient after clipping
    max_norm: float


_first_steps: "weakref.WeakSet[Watch]" = weakref.WeakSet()  # of scalers that still look
_only_scaled: "weakref.WeakSet[Watch]" = weakref.WeakSet()  # of scalers that no step has used


def note_clip(grads: Iterable[Tensor], max_norm: float) -> None:
    """Mark gradients that were just clipped, if a scaler looks for such marks."""
    if len(_first_steps) > 0:
        for grad in grads:
            if not grad.is_inference():
                grad._ampfuse_clip = Clip(grad._version, max_norm)  # type: ignore[attr-defined]


def note_step_without_scaler() -> None:
    """An optimizer takes a step in which no scaler has a part."""
    for watch in list(_only_scaled):
        watch.note_step_without_scaler()


class Watch:
    """What one scaler looks for."""

    def __init__(self) -> None:
        self._steps = 0
        self._steps_without = 0
        self._clipped: tuple[float, Mirror] | None = None  # max_norm, and the scale
        self._norms: list[tuple[float, Mirror]] = []  # limits, and scaled norms
        self._has_warned = False
        _first_steps.add(self)

    def note_scaled_loss(self) -> None:
        """The scaler has scaled a loss."""
        if self._steps == 0:
            _only_scaled.add(self)

    def note_step_without_scaler(self) -> None:
        """An optimizer takes a step after the scaler has scaled losses."""
        self._steps_without += 1
        if self._steps_without == TOO_MANY_STEPS:
            warn_caller(NEVER_STEPPED.format(steps=TOO_MANY_STEPS))

    def note_scaled_gradients(self, grads: Iterable[Tensor], scale: Tensor) -> None:
        """The scaler is about to unscale gradients, or to have an optimizer do it."""
        self._steps += 1
        if self._steps > STEPS_WATCHED:
            _first_steps.discard(self)
        elif self._clipped is None:
            marks = (max_norm_of(grad) for grad in grads)
            max_norm = next((mark for mark in marks if mark is not None), None)
            if max_norm is not None:
                self._clipped = (max_norm, sent(scale))
        _only_scaled.discard(self)
        self._report()

    def note_limit(self, scaled_norm: Tensor, limit: float) -> None:
        """The optimizer is to clip gradients of this norm, still scaled, to a limit."""
        if len(self._norms) < STEPS_WATCHED:
            self._norms.append((limit, sent(scaled_norm)))
            self._report()

    def _report(self) -> None:
        """Warn of what is certain by now."""
        if self._has_warned:
            return
        if self._clipped is not None:
            max_norm, scale = self._clipped[0], self._clipped[1].number()
            if scale is not None and max_norm < FAR_BELOW_THE_SCALE * scale:
                self._warn(CLIPPED_WHILE_SCALED.format(max_norm=max_norm, scale=scale))
        elif len(self._norms) == STEPS_WATCHED:
            norms = [(limit, norm.number()) for limit, norm in self._norms]
            if all(norm is not None and is_clipped(norm, limit) for limit, norm in norms):
                self._warn(CLIPPED_TWICE.format(max_norm=norms[0][0]))

    def _warn(self, text: str) -> None:
        self._has_warned = True
        warn_caller(text)


def max_norm_of(grad: Tensor) -> float | None:
    """What a gradient was clipped to, if nobody has written it since."""
    clip = getattr(grad, "_ampfuse_clip", None)
    return clip.max_norm if clip is not None and clip.version == grad._version else None


def is_clipped(norm: float, limit: float) -> bool:
    """Whether it is the norm that clipping to this limit leaves."""
    return limit > 0 and abs(norm / limit - 1) < 1e-3


def sent(scalar: Tensor) -> Mirror:
    """A copy on its way to the host."""
    mirror = Mirror()
    mirror.send(scalar)
    return mirror
