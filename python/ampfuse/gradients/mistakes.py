"""Warnings about mistakes that raise no error but train on wrong gradients.

A scaler looks for most of them in its first steps alone, and warns once when it is certain. The
numbers that it needs are copied to the host without waiting, so on a GPU the warning may come some
steps later.
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
from ampfuse._host_copy import HostCopy, copied_to_host, number_in
from ampfuse._nested import params_of
from ampfuse._warning import warn_caller
from ampfuse.gradients import _mistake_texts as texts
from ampfuse.gradients._first_norms import (
    FAR_BELOW_THE_SCALE,
    STEPS_WATCHED,
    FirstNorms,
)
from ampfuse.gradients._scaled_backward import ScaledBackward, leaves_of
from ampfuse.gradients.devices import largest
from ampfuse.gradients.shards import local

# At the last of these losses, look once whether all parameters of one of the three losses from the
# first one on were written since, and not by the scaler. Another network may take steps between
# micro-batches, and may be a part of the loss, as the discriminator of a GAN.
FIRST_LOSS, LAST_LOSS = 10, 20
LOSSES_KEPT = 3  # those of a GAN alternate

# A step may have more micro-batches than LAST_LOSS, so losses are looked at until this update, too.
# The graphs of at most so many are searched, since a deep one takes 16 ms.
UPDATES_WATCHED, MOST_LOSSES = 6, 60

# The inverse of this and of smaller scales is not a finite float32 (see csrc/math/fused_step.h), so
# each step is skipped. The first scale is halved 144 times in a row until then.
LARGEST_SCALE_WITHOUT_INVERSE = 2.0**-128
UPDATES_BETWEEN_LOOKS = 16
MOST_SKIPS = 32  # in a row; the search for a first scale takes fewer

IS_SCALED = "ampfuse: scaled"  # the mark of scaled losses in the metadata of their nodes


class ClipRecord(NamedTuple):
    """The record of a gradient that was clipped."""

    version: int  # the gradient's version counter after clipping
    max_norm: float
    total_norm: Tensor  # norm before clipping; if it is a DTensor, this rank's part of it


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
        self._losses_seen = 0  # those whose graph was looked at
        self._has_graph = False  # True if a scaled loss had a gradient
        self._stepped_since_loss: set[int] = set()  # ids of optimizers, since the last scaled loss
        self._repeats = 0  # updates since then in which one of them has stepped again
        self._backward = ScaledBackward()
        self._unused = 0  # updates before which no backward pass came from a scaled loss
        self._params: list[list[tuple[Tensor, int]]] = []  # of the losses kept, with versions
        self._stepped: set[int] = set()  # ids of the parameters that the scaler steps or unscales
        self._updates = 0
        self._scale: HostCopy | None = HostCopy()  # None after the warning about it
        self._ignored_overflow = HostCopy()  # the flag of a step that the scaler did not take
        self._clipped: tuple[float, HostCopy, HostCopy] | None = None  # limit, norm and scale
        self._norms: dict[int, FirstNorms] = {}  # by the ids of optimizers
        self.warnings: list[str] = []  # those that were given
        self.has_reported = False  # True after a warning about clipping
        self._is_listed = False  # True while it is in _first_steps
        self.is_done = False  # True if gradients need not be looked at any more
        self.is_scale_known = False  # True if the program may multiply losses by the scale
        self._is_read_while_scaled = False  # True if it may divide gradients by the scale
        self._announced = 0  # losses of modules that have used the scale, while none was scaled

    @property
    def _is_at_start(self) -> bool:
        # Some programs never update a scaler: with them LAST_LOSS is the end.
        is_early = 0 < self._updates < UPDATES_WATCHED and self._losses_seen < MOST_LOSSES
        return self._losses < LAST_LOSS or is_early

    @property
    def has_scaled(self) -> bool:
        """True if a loss was scaled in eager code."""
        return self._losses > 0

    @property
    def has_unscaled(self) -> bool:
        """True if the scaler has looked at gradients, to step or to unscale them."""
        return self._steps > 0

    @eager_only
    def note_known_scale(self, is_between: bool) -> None:
        """Record that the program knows the scale.

        `is_between`: it has read the scale between a scaled loss and the step.
        """
        self.is_scale_known = True
        self._is_read_while_scaled |= is_between

    @eager_only
    def note_announced(self) -> None:
        """Record that a loss module has used the scale; warn if no loss is ever scaled."""
        if self._losses > 0 or self.is_scale_known or is_capturing():
            return
        self._announced += 1
        if self._announced == LAST_LOSS:
            self._warn(texts.NEVER_SCALED.format(losses=LAST_LOSS))

    @eager_only
    def note_scaled_loss(self, loss: Any, scaled: Any, scaler: Any, history: Any) -> None:
        """Record that `scaler` has scaled a loss: the next gradients are scaled.

        `history`: the scaler's, which knows steps in compiled code, too. Their parameters are not
        known, so nothing is said about steps without the scaler then.
        """
        if is_capturing():  # replays scale losses without this
            self.is_scale_known = self._is_read_while_scaled = True
        self._has_graph |= getattr(loss, "grad_fn", None) is not None
        self._stepped_since_loss.clear()
        self._repeats = 0
        for state in scaler._per_optimizer_states.values():
            if state["stage"] is OptState.UNSCALED and "version" in state:
                is_reset = state["version"][0].grad is None
                state["is_stale"] = state.get("is_stale", False) or is_reset
        if self._is_at_start or self._is_listed:
            with _lock:
                _clips.clear()
                self._is_listed = self._is_at_start
                (_first_steps.add if self._is_listed else _first_steps.discard)(self)
        if self._is_at_start:
            self._losses_seen += 1
            self._look_at_scaled(loss, scaled)
        if self._losses < LAST_LOSS:
            self._losses = LAST_LOSS if history.is_last_in_graph else self._losses + 1
            self._look_for_steps_without_scaler(loss)

    def _look_at_scaled(self, loss: Any, scaled: Any) -> None:
        """Warn if the loss was scaled before; `scaled` is the product."""
        if getattr(scaled, "grad_fn", None) is not None:
            if loss.grad_fn is not None and loss.grad_fn.metadata.get(IS_SCALED):
                self._warn(texts.SCALED_TWICE)
            scaled.grad_fn.metadata[IS_SCALED] = True
        if type(scaled) is not Tensor or is_capturing():
            self._backward.note_other()
        elif scaled.grad_fn is not None:
            self._backward.watch(loss, scaled)

    @contextmanager
    def unnoticed(self) -> Iterator[None]:
        """Read the scale in this block without recording that the program knows it."""
        was_known = self.is_scale_known, self._is_read_while_scaled
        yield
        self.is_scale_known, self._is_read_while_scaled = was_known

    def _look_for_steps_without_scaler(self, loss: Any) -> None:
        """Warn if all parameters of a loss are written by something else than the scaler."""
        if FIRST_LOSS <= self._losses < FIRST_LOSS + LOSSES_KEPT and isinstance(loss, Tensor):
            # Other leaves are inputs, which adversarial training writes by the signs of gradients.
            params = (leaf for leaf in leaves_of(loss) if isinstance(leaf, Parameter))
            self._params.append([(param, param._version) for param in params])
        elif self._losses == LAST_LOSS:
            losses, self._params = [one for one in self._params if one], []
            if self.is_scale_known or texts.STEPPED_ALONE in self.warnings:
                return
            are_own = [any(id(param) in self._stepped for param, _ in one) for one in losses]
            are_written = [all(param._version > then for param, then in one) for one in losses]
            if (False, True) in zip(are_own, are_written, strict=True):
                if any(are_own):
                    self._warn(texts.STEPPED_BESIDE)
                elif not self._stepped:
                    self._warn(texts.NEVER_STEPPED.format(losses=LAST_LOSS))

    def _note_params(self, optimizer: Any) -> Tensor | None:
        """Record that the scaler steps these parameters; return the first that has a gradient."""
        params = params_of(optimizer)
        if self._is_at_start and not self.is_scale_known:
            self._stepped.update(map(id, params))
        return next((param for param in params if param.grad is not None), None)

    @eager_only
    def note_unscaling(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Record in the scaler's `state` how often a parameter was written before its step."""
        param = self._note_params(optimizer)
        if param is not None and not param.is_inference():
            state["version"] = param, param._version
            self._backward.forget(param)
        if not self.is_done and not is_capturing():
            self._report()

    @eager_only
    def look_for_new_gradients(self, state: dict[str, Any]) -> None:
        """Warn if gradients were computed again after they were unscaled."""
        is_added_to = "version" in state and self._backward.has_computed(state["version"][0])
        if is_added_to or has_new_gradients(state):
            state["is_stale"] = False  # one warning is enough
            self._warn(texts.COMPUTED_AGAIN)

    def _look_at_backward(self) -> None:
        """Warn if scaled losses were not used."""
        if self._is_at_start and not self.is_scale_known:
            self._unused += self._backward.is_unused()
            if self._unused == STEPS_WATCHED:
                self._warn(texts.UNUSED)
        self._backward.end_step()

    def look_at_own_step(self, param: Tensor) -> None:
        """Warn if an optimizer steps by itself with a gradient of `param` that is scaled."""
        if not self.is_scale_known and self._backward.is_scaled(param):
            self._warn(texts.STEPPED_ALONE)

    @eager_only
    def end_step(self) -> None:
        """Forget the backward passes before an update that sets the scale."""
        self._backward.end_step()

    def _look_for_forgotten_losses(self, scaler: Any) -> None:
        """Warn if no loss was scaled for some steps.

        One loss may serve several optimizers, with an update after each. The first stages of a
        pipeline, which have a process group, scale no loss.
        """
        states = scaler._per_optimizer_states
        stepped = {key for key, state in states.items() if state["stage"] is OptState.STEPPED}
        self._repeats += not self._stepped_since_loss.isdisjoint(stepped)
        self._stepped_since_loss |= stepped
        must_scale = scaler.process_group is None and scaler.scales_by_itself()
        is_certain = must_scale and self._has_graph and not self.is_scale_known
        if self._repeats == STEPS_WATCHED and is_certain:
            self._warn(texts.FORGOTTEN.format(steps=STEPS_WATCHED))

    def _look_for_steps_after_unscaling(
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
        if texts.STEPPED_IN_SPITE in self.warnings or not has_number(found_inf):
            return
        if self._ignored_overflow.is_unsent() or self._ignored_overflow.number() == 0:
            self._ignored_overflow.send(found_inf)
        if self._ignored_overflow.number():
            self._warn(texts.STEPPED_IN_SPITE)

    @eager_only
    def note_update(self, scaler: Any, history: Any, scale: Tensor) -> None:
        """Look for mistakes that the steps before an update show."""
        states = scaler._per_optimizer_states.values()
        self._look_for_steps_after_unscaling(states, history)
        self._look_for_forgotten_losses(scaler)
        self._look_at_backward()
        self._look_at_scale(scale, history)

    def _look_at_scale(self, scale: Tensor, history: Any) -> None:
        """Warn once if many steps in a row were skipped, and if each will be from now on."""
        self._updates += 1
        if self._updates % UPDATES_BETWEEN_LOOKS or self._scale is None or not has_number(scale):
            return
        number = self._scale.number() if scale.is_cuda else number_in(scale)
        if number is not None and number <= LARGEST_SCALE_WITHOUT_INVERSE:
            self._scale = None
            self._warn(texts.LOST_SCALE.format(scale=number))
        elif not is_capturing():
            is_skipped = texts.STEPPED_IN_SPITE not in self.warnings
            if is_skipped and history.consecutive_skips() >= MOST_SKIPS:
                self._warn(texts.ALWAYS_SKIPPED.format(steps=MOST_SKIPS))
            if scale.is_cuda:
                self._scale.send(scale)

    @eager_only
    def note_scaled_gradients(self, optimizer: Any, scale: Tensor) -> None:
        """Check whether gradients that are still scaled were clipped. Each call is one step."""
        if self.is_done or is_capturing():
            return
        self._steps += 1
        is_looking = self._steps <= STEPS_WATCHED and self._clipped is None
        if is_looking and not self._is_read_while_scaled and has_number(scale):
            clip = first_clip(params_of(optimizer))
            if clip is not None and has_number(clip.total_norm):
                self._clipped = (
                    clip.max_norm,
                    copied_to_host(clip.total_norm.float()),
                    copied_to_host(scale),
                )

    @eager_only
    def look_at_step(
        self, optimizer: Any, state: dict[str, Any], inspection: Any, scaler: Any
    ) -> None:
        """Look at the gradients with which `scaler` is about to step an optimizer."""
        if inspection is not None and not self.has_reported and not is_capturing():
            self._note_norm(optimizer, state, inspection, scaler)
        if not self.is_done and not is_capturing():
            self._report()
        param = self._note_params(optimizer) if self._is_at_start else None
        self.look_for_new_gradients(state)
        if param is not None and inspection is not None and inspection.is_scaled:
            self._backward.note_inspection(param)

    def _note_norm(
        self, optimizer: Any, state: dict[str, Any], inspection: Any, scaler: Any
    ) -> None:
        """Record the norm of an optimizer's gradients, and the limit of its own."""
        limit = getattr(optimizer, "max_grad_norm", None) if inspection.is_scaled else None
        may_guess = scaler._has_scaled and not self._is_read_while_scaled
        if limit is None and not may_guess:
            return
        norms, scale = self._norms.get(id(optimizer)), scaler._scale
        if norms is None:
            norms = self._norms[id(optimizer)] = FirstNorms(optimizer)
        # A program that has seen unscaled gradients may have clipped them.
        may_guess = may_guess and (state.get("is_unread", False) or norms.tolerance.is_fine)
        if norms.are_judged or (limit is None and not may_guess):
            return
        found = list(inspection.total_norms.values())
        if len(found) == 1 and len(norms.steps) < STEPS_WATCHED:
            (norm,) = found
            if has_number(norm) and has_number(scale):
                norms.add(norm, scale, inspection.is_scaled, limit, may_guess)
                self.is_done = False

    def _report(self) -> None:
        """Warn if a mistake with the clipping is certain by now, and note whether to look on."""
        if not self.has_reported:
            self._judge_norms()
        is_waiting = self._clipped or any(one.is_waiting for one in self._norms.values())
        self.is_done = self._steps > STEPS_WATCHED and (self.has_reported or not is_waiting)

    def _judge_norms(self) -> None:
        if self._clipped is not None:
            max_norm, norm, scale = self._clipped[0], *(copy.number() for copy in self._clipped[1:])
            if norm is not None and scale is not None:
                self._clipped = None  # a norm below the limit was not clipped: look again
                if max_norm < min(norm, FAR_BELOW_THE_SCALE * scale):
                    self._report_once(texts.CLIPPED_WHILE_SCALED, max_norm, scale)
            return
        waiting = [norms for norms in self._norms.values() if norms.is_waiting]
        for found in filter(None, [norms.mistake() for norms in waiting]):
            self._report_once(*found)

    def _report_once(self, text: str, max_norm: float, scale: float) -> None:
        self.has_reported = True
        self._warn(text.format(max_norm=max_norm, scale=scale))

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            warn_caller(text)


def note_own_step(params: Iterable[Tensor]) -> None:
    """Look whether an optimizer steps by itself, in eager code, with gradients that are scaled."""
    if len(_first_steps) == 0:
        return
    param = next(iter(params), None)
    if param is not None:
        with _lock:
            watches = list(_first_steps)
        for watch in watches:
            watch.look_at_own_step(param)


def has_new_gradients(state: dict[str, Any]) -> bool:
    """Return True if gradients were reset and computed again since they were unscaled."""
    return state.get("is_stale", False) and state["version"][0].grad is not None


def first_clip(params: Iterable[Tensor]) -> ClipRecord | None:
    """Return the record of the first gradient that was clipped and not written since, or None."""
    with _lock:
        for param in params:
            clip = _clips.get(id(param.grad))
            if clip is not None and param.grad is not None and clip.version == param.grad._version:
                return clip
    return None


def has_number(tensor: Tensor) -> bool:
    """Return False for meta and fake tensors, which have no memory."""
    return type(tensor) is Tensor and not tensor.is_meta
