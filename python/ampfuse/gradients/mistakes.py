"""Warnings about mistakes that raise no error but train on wrong gradients.

A scaler looks for them in its first steps, and warns once when it is certain. The numbers that it
needs are copied to the host without waiting, so on a GPU the warning may come some steps later.
"""

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from ampfuse._graphs import eager_only, groups_of
from ampfuse._host_copy import HostCopy
from ampfuse._warning import warn_caller
from ampfuse.gradients.shards import local

STEPS_WATCHED = 3

# A limit below this fraction of the scale is a mistake: a program that clips scaled gradients on
# purpose multiplies the limit by the scale.
FAR_BELOW_THE_SCALE = 1e-3

# After this many steps without the scaler, each after a loss that it scaled, look once whether the
# optimizer has all parameters of that loss. Another network may take steps between micro-batches,
# and may be a part of the loss, as the discriminator of a GAN.
TOO_MANY_STEPS = 20

CLIPPED_WHILE_SCALED = (
    "gradients were clipped to max_norm={max_norm:g} while they were still multiplied by the loss "
    "scale, {scale:g}, so they are almost zero after unscaling: call "
    "scaler.clip_grad_norm_(optimizer, max_norm), or scaler.unscale_(optimizer) before clipping"
)
CLIPPED_TWICE = (
    "gradients had been clipped to {max_norm:g} before the step while they were still multiplied "
    "by the loss scale, so they are almost zero after unscaling: the optimizer's "
    "max_grad_norm={max_norm:g} clips them inside the step; remove the other clipping"
)
NEVER_STEPPED = (
    "an optimizer has taken {steps} steps by optimizer.step() since a GradScaler began to scale "
    "losses of its parameters, and none by scaler.step(optimizer), so the gradients are still "
    "multiplied by the loss scale: call scaler.step(optimizer) instead"
)


class ClipRecord(NamedTuple):
    """The record of a gradient that was clipped."""

    version: int  # the gradient's version counter after clipping
    max_norm: float
    total_norm: Tensor  # norm before clipping; if it is a DTensor, this rank's part of it


_lock = threading.Lock()  # guards the next three: each thread may train its own model
_first_steps: "weakref.WeakSet[Watch]" = weakref.WeakSet()  # scalers in their first steps
_only_scaled: "weakref.WeakSet[Watch]" = weakref.WeakSet()  # scalers that have taken no step yet
# By the ids of gradients that were clipped since the last scaled loss. Weak references would keep
# torch from moving or casting a model of DTensors.
_clips: dict[int, ClipRecord] = {}


@eager_only
def note_clip(grads: Iterable[Tensor], max_norm: float, total_norm: Tensor) -> None:
    """Record gradients that were just clipped, if any scaler is in its first steps."""
    if len(_first_steps) == 0:
        return
    with _lock:
        for grad in grads:
            if not grad.is_inference():
                _clips[id(grad)] = ClipRecord(grad._version, max_norm, local(total_norm))


@eager_only
def note_step_without_scaler(optimizer: Any) -> None:
    """Record that an optimizer takes a step without a scaler."""
    if len(_only_scaled) == 0:
        return
    with _lock:
        watches = list(_only_scaled)
    for watch in watches:
        watch.note_step_without_scaler(optimizer)


class Watch:
    """Looks for mistakes in the use of one scaler."""

    def __init__(self) -> None:
        self._steps = 0
        self._steps_without = 0
        self._leaves: set[int] = set()  # ids of the parameters of the loss before the check
        self._has_scaled = False  # True from a scaled loss to a step without the scaler
        self._clipped: tuple[float, HostCopy, HostCopy] | None = None  # limit, norm and scale
        self._norms: list[tuple[float, HostCopy, HostCopy]] = []  # limits, scaled norms, scales
        self.has_reported = False  # True after a warning, or if all norms were right
        self.is_done = False  # True if gradients need not be looked at any more
        self.is_scale_known = False  # True if the program may divide by the scale

    @eager_only
    def note_known_scale(self) -> None:
        """Record that the program knows the scale, so it may divide gradients by it."""
        self.is_scale_known = True

    @eager_only
    def note_scaled_loss(self, loss: Any = None) -> None:
        """Record that the scaler has scaled a loss: the next gradients are scaled."""
        if self._steps > STEPS_WATCHED:
            return
        self._has_scaled = True
        if self._steps_without == TOO_MANY_STEPS - 1 and isinstance(loss, Tensor):
            self._leaves = leaves_of(loss)
        with _lock:
            _clips.clear()
            if self._steps == 0:
                _only_scaled.add(self)
                _first_steps.add(self)

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Read the scale in this block without recording that the program knows it."""
        was_known = self.is_scale_known
        yield
        self.is_scale_known = was_known

    def note_step_without_scaler(self, optimizer: Any) -> None:
        """Count a step without the scaler, if it has scaled a loss since the last such step."""
        if not self._has_scaled or self.is_scale_known:
            return
        self._has_scaled = False
        self._steps_without += 1
        if self._steps_without == TOO_MANY_STEPS and self._leaves:
            stepped = {id(param) for group in groups_of(optimizer) for param in group["params"]}
            if self._leaves <= stepped:
                warn_caller(NEVER_STEPPED.format(steps=TOO_MANY_STEPS))

    def note_scaled_gradients(self, grads: Iterable[Tensor], scale: Tensor) -> None:
        """Check whether gradients that are still scaled were clipped. Each call is one step."""
        self._steps += 1
        with _lock:
            _only_scaled.discard(self)
            if self._steps > STEPS_WATCHED:
                _first_steps.discard(self)
                if len(_first_steps) == 0:
                    _clips.clear()
        is_looking = self._steps <= STEPS_WATCHED and self._clipped is None
        if is_looking and not self.is_scale_known and has_number(scale):
            clip = first_clip(grads)
            if clip is not None and has_number(clip.total_norm):
                self._clipped = (
                    clip.max_norm,
                    copied_to_host(clip.total_norm.float()),
                    copied_to_host(scale),
                )
        self._report()
        is_waiting = self._clipped is not None or len(self._norms) > 0
        self.is_done = self._steps > STEPS_WATCHED and (self.has_reported or not is_waiting)

    def note_limit(self, scaled_norm: Tensor, limit: float, scale: Tensor) -> None:
        """Record the norm of scaled gradients, and the limit that the optimizer clips to."""
        if len(self._norms) < STEPS_WATCHED and has_number(scaled_norm) and has_number(scale):
            self._norms.append((limit, copied_to_host(scaled_norm), copied_to_host(scale)))
        self._report()

    def _report(self) -> None:
        """Warn if a mistake is certain by now."""
        if self.has_reported:
            return
        if self._clipped is not None:
            max_norm, norm, scale = self._clipped[0], *(copy.number() for copy in self._clipped[1:])
            if norm is not None and scale is not None:
                self._clipped = None  # a norm below the limit was not clipped: look again
                if max_norm < min(norm, FAR_BELOW_THE_SCALE * scale):
                    self._warn(CLIPPED_WHILE_SCALED.format(max_norm=max_norm, scale=scale))
        elif len(self._norms) == STEPS_WATCHED:
            checks = [(limit, norm.number(), scale.number()) for limit, norm, scale in self._norms]
            arrived = [(n, limit, s) for limit, n, s in checks if n is not None and s is not None]
            self.has_reported = len(arrived) == STEPS_WATCHED
            if self.has_reported and all(was_clipped(*check) for check in arrived):
                self._warn(CLIPPED_TWICE.format(max_norm=checks[0][0]))

    def _warn(self, text: str) -> None:
        self.has_reported = True
        warn_caller(text)


def first_clip(grads: Iterable[Tensor]) -> ClipRecord | None:
    """Return the record of the first gradient that was clipped and not written since, or None."""
    with _lock:
        for grad in grads:
            clip = _clips.get(id(grad))
            if clip is not None and clip.version == grad._version:
                return clip
    return None


def leaves_of(loss: Tensor) -> set[int]:
    """Return the ids of the tensors whose gradients a backward pass of the loss computes."""
    nodes: list[Any] = [loss.grad_fn]
    seen, leaves = {None}, set()
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.add(id(node.variable))
            nodes += [following for following, _ in node.next_functions]
    return leaves


def was_clipped(norm: float, limit: float, scale: float) -> bool:
    """Return True if gradients of this norm were clipped to this limit while they were scaled."""
    return 0 < limit < FAR_BELOW_THE_SCALE * scale and abs(norm / limit - 1) < 1e-3


def has_number(tensor: Tensor) -> bool:
    """Return False for meta and fake tensors, which have no memory."""
    return type(tensor) is Tensor and not tensor.is_meta


def copied_to_host(scalar: Tensor) -> HostCopy:
    """Start copying a scalar to the host."""
    mirror = HostCopy()
    mirror.send(scalar)
    return mirror
