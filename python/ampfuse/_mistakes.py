"""Mistakes that raise nothing and train on wrong gradients: one warning, where they are certain.

A scaler looks for them in its first steps. What it needs to know is copied to the host without
waiting, so that on a GPU a warning may come some steps later.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ampfuse._host_copy import HostCopy
from ampfuse._warning import warn_caller

STEPS_WATCHED = 3

# Whoever clips scaled gradients on purpose multiplies the limit by the scale.
FAR_BELOW_THE_SCALE = 1e-3

# Steps without the scaler, each after a loss that it scaled: more than an accumulated batch has
# parts, between which another network may take steps.
TOO_MANY_STEPS = 1000

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
    """What is known of a gradient that was clipped."""

    version: int  # of the gradient after clipping
    max_norm: float


_lock = threading.Lock()  # of these three, since threads may train models of their own
_first_steps: "weakref.WeakSet[Watch]" = weakref.WeakSet()  # of scalers that still look
_only_scaled: "weakref.WeakSet[Watch]" = weakref.WeakSet()  # of scalers that no step has used
_clips = WeakTensorKeyDictionary()  # of gradients that live


def note_clip(grads: Iterable[Tensor], max_norm: float) -> None:
    """Remember gradients that were just clipped, if a scaler asks for them."""
    if len(_first_steps) == 0:
        return
    with _lock:
        for grad in grads:
            if not grad.is_inference():
                _clips[grad] = Clip(grad._version, max_norm)


def note_step_without_scaler() -> None:
    """An optimizer takes a step in which no scaler has a part."""
    if len(_only_scaled) == 0:
        return
    with _lock:
        watches = list(_only_scaled)
    for watch in watches:
        watch.note_step_without_scaler()


class Watch:
    """What one scaler looks for."""

    def __init__(self) -> None:
        self._steps = 0
        self._steps_without = 0
        self._has_scaled = False  # a loss since the last step without it
        self._clipped: tuple[float, HostCopy] | None = None  # max_norm, and the scale
        self._norms: list[tuple[float, HostCopy, HostCopy]] = []  # limits, scaled norms, scales
        self._has_warned = False
        self.is_scale_known = False  # to the program, which may divide gradients by it

    def note_scaled_loss(self) -> None:
        """The scaler has scaled a loss, and gradients that come are scaled."""
        if self._steps > STEPS_WATCHED:
            return
        self._has_scaled = True
        with _lock:
            _clips.clear()
            if self._steps == 0:
                _only_scaled.add(self)
                _first_steps.add(self)

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """To ask for the scale on the library's own behalf."""
        was_known = self.is_scale_known
        yield
        self.is_scale_known = was_known

    def note_step_without_scaler(self) -> None:
        """An optimizer takes a step after the scaler has scaled losses."""
        if not self._has_scaled or self.is_scale_known:
            return
        self._has_scaled = False
        self._steps_without += 1
        if self._steps_without == TOO_MANY_STEPS:
            warn_caller(NEVER_STEPPED.format(steps=TOO_MANY_STEPS))

    def note_scaled_gradients(self, grads: Iterable[Tensor], scale: Tensor) -> None:
        """The scaler is about to unscale gradients, or to have an optimizer do it."""
        self._steps += 1
        with _lock:
            _only_scaled.discard(self)
            if self._steps > STEPS_WATCHED:
                _first_steps.discard(self)
        is_looking = self._steps <= STEPS_WATCHED and self._clipped is None
        if is_looking and not self.is_scale_known and has_number(scale):
            max_norm = first_limit(grads)
            if max_norm is not None:
                self._clipped = (max_norm, sent(scale))
        self._report()

    def note_limit(self, scaled_norm: Tensor, limit: float, scale: Tensor) -> None:
        """The optimizer is to clip gradients of this norm, still scaled, to a limit."""
        if len(self._norms) < STEPS_WATCHED and has_number(scaled_norm) and has_number(scale):
            self._norms.append((limit, sent(scaled_norm), sent(scale)))
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
            looks = [(limit, norm.number(), scale.number()) for limit, norm, scale in self._norms]
            if all(
                norm is not None and scale is not None and was_clipped(norm, limit, scale)
                for limit, norm, scale in looks
            ):
                self._warn(CLIPPED_TWICE.format(max_norm=looks[0][0]))

    def _warn(self, text: str) -> None:
        self._has_warned = True
        warn_caller(text)


def first_limit(grads: Iterable[Tensor]) -> float | None:
    """The limit of the first gradient that was clipped and not written since, if there is one."""
    with _lock:
        for grad in grads:
            clip = _clips[grad] if grad in _clips else None  # noqa: SIM401 (its get() has no types)
            if clip is not None and clip.version == grad._version:
                limit: float = clip.max_norm
                return limit
    return None


def was_clipped(norm: float, limit: float, scale: float) -> bool:
    """Whether gradients of this norm were clipped to this limit while they were scaled."""
    return 0 < limit < FAR_BELOW_THE_SCALE * scale and abs(norm / limit - 1) < 1e-3


def has_number(scalar: Tensor) -> bool:
    """False in a rehearsal with tensors that have no memory."""
    return type(scalar) is Tensor and not scalar.is_meta


def sent(scalar: Tensor) -> HostCopy:
    """A copy on its way to the host."""
    mirror = HostCopy()
    mirror.send(scalar)
    return mirror
