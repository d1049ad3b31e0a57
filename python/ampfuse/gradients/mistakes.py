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
from torch.amp.grad_scaler import OptState
from torch.nn import Parameter

from ampfuse._graphs import eager_only, is_capturing
from ampfuse._host_copy import HostCopy, number_in
from ampfuse._nested import params_of
from ampfuse._warning import warn_caller
from ampfuse.gradients import _mistake_texts as texts
from ampfuse.gradients.devices import largest
from ampfuse.gradients.shards import local

STEPS_WATCHED = 3

# A limit below this fraction of the scale is a mistake: a program that clips scaled gradients on
# purpose multiplies the limit by the scale.
FAR_BELOW_THE_SCALE = 1e-3

# At the last of these losses, look once whether all parameters of one of the three losses from the
# first one on were written since, and not by the scaler. Another network may take steps between
# micro-batches, and may be a part of the loss, as the discriminator of a GAN.
FIRST_LOSS, LAST_LOSS = 10, 20
LOSSES_KEPT = 3  # those of a GAN alternate

# The inverse of this and of smaller scales is not a finite float32 (see csrc/math/fused_step.h), so
# each step is skipped. The first scale is halved 144 times in a row until then.
LARGEST_SCALE_WITHOUT_INVERSE = 2.0**-128
UPDATES_BETWEEN_LOOKS = 16


class ClipRecord(NamedTuple):
    """The record of a gradient that was clipped."""

    version: int  # the gradient's version counter after clipping
    max_norm: float
    total_norm: Tensor  # norm before clipping; if it is a DTensor, this rank's part of it


class Norms:
    """Limits (None without one), scaled norms and scales of the first steps of a scaler."""

    def __init__(self) -> None:
        self.of_steps: list[tuple[float | None, HostCopy, HostCopy]] = []
        self.are_judged = False

    @property
    def is_waiting(self) -> bool:
        """True if there are norms, and not all have arrived on the host."""
        return len(self.of_steps) > 0 and not self.are_judged

    def arrived(self) -> list[tuple[float, float | None, float]]:
        """Return norms, limits and scales that have arrived."""
        numbers = [(norm.number(), limit, scale.number()) for limit, norm, scale in self.of_steps]
        return [(n, limit, s) for n, limit, s in numbers if n is not None and s is not None]


_lock = threading.Lock()  # guards the next two: each thread may train its own model
_first_steps: "weakref.WeakSet[Watch]" = weakref.WeakSet()  # scalers in their first steps
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


class Watch:
    """Looks for mistakes in the use of one scaler."""

    def __init__(self) -> None:
        self._steps = 0
        self._losses = 0  # scaled, up to LAST_LOSS
        self._all_losses = 0  # scaled
        self._unscaled_losses = 0  # updates in a row without a scaled loss
        self._params: list[list[tuple[Tensor, int]]] = []  # of the losses kept, with versions
        self._stepped: set[int] = set()  # ids of the parameters that the scaler steps or unscales
        self._updates = 0
        self._scale: HostCopy | None = HostCopy()  # None after the warning about it
        self._ignored_overflow = HostCopy()  # the flag of a step that the scaler did not take
        self._clipped: tuple[float, HostCopy, HostCopy] | None = None  # limit, norm and scale
        self._with_limit, self._without_limit = Norms(), Norms()
        self.warnings: list[str] = []  # those that were given
        self._has_warned_of_overflow = False
        self.has_reported = False  # True after a warning about clipping
        self.is_done = False  # True if gradients need not be looked at any more
        self.is_scale_known = False  # True if the program may divide by the scale

    @property
    def has_unscaled(self) -> bool:
        """True if the scaler has looked at gradients, to step or to unscale them."""
        return self._steps > 0

    @eager_only
    def note_known_scale(self) -> None:
        """Record that the program knows the scale, so it may divide gradients by it."""
        self.is_scale_known = True

    @eager_only
    def note_scaled_loss(self, loss: Any, scaler: Any, history: Any) -> None:
        """Record that a scaler scales a loss: the next gradients are scaled.

        `history`: the scaler's, which knows steps in compiled code, too. Their parameters are not
        known, so nothing is said about steps without the scaler then.
        """
        self._all_losses += 1
        if self._steps <= STEPS_WATCHED:
            with _lock:
                _clips.clear()
                if self._steps == 0:
                    _first_steps.add(self)
        if self._losses < LAST_LOSS:
            factor = getattr(getattr(loss, "grad_fn", None), "_saved_other", None)
            if factor is not None and factor is getattr(scaler, "_scale", None):
                self._warn(texts.SCALED_TWICE)
            self._losses = LAST_LOSS if history.is_last_in_graph else self._losses + 1
            self._look_for_steps_without_scaler(loss)

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Read the scale in this block without recording that the program knows it."""
        was_known = self.is_scale_known
        yield
        self.is_scale_known = was_known

    def _look_for_steps_without_scaler(self, loss: Any) -> None:
        """Warn if all parameters of a loss are written by something else than the scaler."""
        if FIRST_LOSS <= self._losses < FIRST_LOSS + LOSSES_KEPT and isinstance(loss, Tensor):
            # Other leaves are inputs, which adversarial training writes by the signs of gradients.
            params = (leaf for leaf in leaves_of(loss) if isinstance(leaf, Parameter))
            self._params.append([(param, param._version) for param in params])
        elif self._losses == LAST_LOSS:
            losses, self._params = [one for one in self._params if one], []
            if self.is_scale_known:
                return
            are_own = [any(id(param) in self._stepped for param, _ in one) for one in losses]
            are_written = [all(param._version > then for param, then in one) for one in losses]
            if (False, True) in zip(are_own, are_written, strict=True):
                if any(are_own):
                    self._warn(texts.STEPPED_BESIDE)
                elif not self._stepped:
                    self._warn(texts.NEVER_STEPPED.format(losses=LAST_LOSS))

    @eager_only
    def note_step(self, optimizer: Any) -> None:
        """Record that the scaler steps an optimizer, or unscales its gradients."""
        if self._losses < LAST_LOSS and not self.is_scale_known:
            self._stepped.update(map(id, params_of(optimizer)))

    @eager_only
    def note_unscaling(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Record in the scaler's `state` which gradient was unscaled, and its parameter's version.

        One parameter stands for all.
        """
        self.note_step(optimizer)
        param = next((param for param in params_of(optimizer) if param.grad is not None), None)
        if param is not None and not param.is_inference():
            state["version"] = param, param._version
            state["unscaled"] = param.grad, self._all_losses

    @eager_only
    def look_for_new_gradients(self, state: dict[str, Any]) -> None:
        """Warn if a backward pass has put other gradients in place of those that were unscaled."""
        if "unscaled" not in state or self._all_losses == state["unscaled"][1]:
            return
        grad = state["version"][0].grad
        if grad is not None and grad is not state["unscaled"][0]:
            del state["unscaled"]  # one warning is enough
            self._warn(texts.COMPUTED_AGAIN)

    @eager_only
    def note_plain_steps(self, optimizer: Any, state: dict[str, Any], inspection: Any) -> None:
        """Record in the scaler's `state` how many steps the optimizer has taken without a scaler.

        Only ampfuse's optimizers, whose steps may leave gradients scaled, count them.
        """
        is_scaled = inspection is not None and inspection.is_scaled
        if is_scaled and (slot := getattr(optimizer, "_slot", None)) is not None:
            state["slot"] = slot, slot.plain_steps

    @eager_only
    def look_for_forgotten_losses(self, states: Iterable[dict[str, Any]], has_scaled: bool) -> None:
        """Warn if no loss was scaled for some updates, or if an optimizer has stepped twice."""
        self._unscaled_losses = 0 if has_scaled else self._unscaled_losses + 1
        if self._unscaled_losses == STEPS_WATCHED and not self.is_scale_known:
            self._warn(texts.FORGOTTEN.format(steps=STEPS_WATCHED))
        slots = [state["slot"] for state in states if "slot" in state]
        has_stepped_twice = any(slot.plain_steps > then for slot, then in slots)
        if has_stepped_twice and texts.STEPPED_TWICE not in self.warnings:
            self._warn(texts.STEPPED_TWICE)

    @eager_only
    def look_for_steps_after_unscaling(
        self, states: Iterable[dict[str, Any]], history: Any
    ) -> None:
        """Record steps that optimizers have taken by themselves after `unscale_` as taken."""
        for state in states:
            if "version" not in state or state["stage"] is OptState.STEPPED or is_capturing():
                continue
            param, version = state["version"]
            if param._version != version:
                history.note_taken()
                self._note_ignored_flag(largest([*state["found_inf_per_device"].values()]))

    def _note_ignored_flag(self, found_inf: Tensor) -> None:
        """Warn if an optimizer has stepped by itself after `unscale_` has set this flag."""
        if self._has_warned_of_overflow or not has_number(found_inf):
            return
        if self._ignored_overflow.is_unsent() or self._ignored_overflow.number() == 0:
            self._ignored_overflow.send(found_inf)
        if self._ignored_overflow.number():
            self._has_warned_of_overflow = True
            self._warn(texts.STEPPED_IN_SPITE)

    @eager_only
    def note_update(self, scale: Tensor) -> None:
        """Warn once if the scale has fallen so far that each step is skipped."""
        self._updates += 1
        if self._updates % UPDATES_BETWEEN_LOOKS or self._scale is None or not has_number(scale):
            return
        number = self._scale.number() if scale.is_cuda else number_in(scale)
        if number is not None and number <= LARGEST_SCALE_WITHOUT_INVERSE:
            self._scale = None
            self._warn(texts.LOST_SCALE.format(scale=number))
        elif scale.is_cuda and not is_capturing():
            self._scale.send(scale)

    @eager_only
    def note_scaled_gradients(self, optimizer: Any, scale: Tensor) -> None:
        """Check whether gradients that are still scaled were clipped. Each call is one step."""
        if self.is_done or is_capturing():
            return
        grads = (param.grad for param in params_of(optimizer) if param.grad is not None)
        self._steps += 1
        with _lock:
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
        is_waiting = self._clipped is not None or self._with_limit.is_waiting
        self.is_done = self._steps > STEPS_WATCHED and (self.has_reported or not is_waiting)

    @eager_only
    def note_limit(self, inspection: Any, limit: float | None, scale: Tensor) -> None:
        """Record the norm of scaled gradients, and the optimizer's own limit, or None."""
        norms = self._without_limit if limit is None else self._with_limit
        if self.has_reported or norms.are_judged or is_capturing():
            return
        if limit is None and self.is_scale_known:
            return
        found = list(inspection.total_norms.values())
        if len(found) != 1:
            return
        (norm,) = found
        if len(norms.of_steps) < STEPS_WATCHED and has_number(norm) and has_number(scale):
            scaled_norm = norm if inspection.is_scaled else norm * scale
            norms.of_steps.append((limit, copied_to_host(scaled_norm), copied_to_host(scale)))
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
                    self._report_once(texts.CLIPPED_WHILE_SCALED, max_norm, scale)
            return
        for norms in (self._with_limit, self._without_limit):
            arrived = norms.arrived()
            if len(arrived) < STEPS_WATCHED or norms.are_judged:
                continue
            norms.are_judged = True
            # Without a limit, gradients that have the same norm in each step were clipped to it.
            first_norm, limit, scale = arrived[0]
            clipped_to = first_norm if limit is None else limit
            if all(was_clipped(norm, clipped_to, s) for norm, _, s in arrived):
                text = texts.CLIPPED_WHILE_SCALED if limit is None else texts.CLIPPED_TWICE
                self._report_once(text, clipped_to, scale)

    def _report_once(self, text: str, max_norm: float, scale: float) -> None:
        self.has_reported = True
        self._warn(text.format(max_norm=max_norm, scale=scale))

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        warn_caller(text)


def first_clip(grads: Iterable[Tensor]) -> ClipRecord | None:
    """Return the record of the first gradient that was clipped and not written since, or None."""
    with _lock:
        for grad in grads:
            clip = _clips.get(id(grad))
            if clip is not None and clip.version == grad._version:
                return clip
    return None


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward pass of the loss computes."""
    nodes: list[Any] = [loss.grad_fn]
    seen, leaves = {None}, []
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
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
