"""A scaler whose steps and updates stay on the device: what torch's class does in private methods.

torch.compile does not trace the methods of torch's class, so all that a step needs is here.
"""

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ampfuse import ops
from ampfuse._graphs import at_compile_time, eager_only, make_static, traced_as
from ampfuse.amp._products import flag_without_inverse
from ampfuse.amp._reports import ReportingScaler
from ampfuse.amp._snapshot import ScalerSnapshot
from ampfuse.gradients.backward_norms import BackwardNorms
from ampfuse.gradients.devices import largest, move_to
from ampfuse.gradients.inspection import (
    Inspection,
    add_norm_of_shards,
    gradients_of,
    inspect,
    norm_or_refuse,
    unscaled_norm,
)
from ampfuse.gradients.mistakes import has_new_gradients
from ampfuse.gradients.signals import Signals
from ampfuse.optim.stepping import step_with


class DeviceScaler(ReportingScaler):
    """The base of `GradScaler`, which has the public methods."""

    _has_announced = False  # True if a loss module has asked for the scale since the last update
    _has_scaled = False  # True if a loss was scaled since then

    # --- steps and updates ----------------------------------------------------------------------

    def _step(
        self,
        optimizer: Optimizer,
        takes_scale: bool,
        takes_flag: bool,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Step an optimizer that may take the flag, and the scale with it, but not the scaler."""
        scale, _ = self._check_scale_growth_tracker("step")
        self._check_scaled("step")
        state = self._current_state(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Is scaler.update() "
                "missing?"
            )
        if state["stage"] is OptState.READY:
            state["is_unread"] = True  # the program has not seen unscaled gradients
            if takes_scale:
                self._watch.note_scaled_gradients(optimizer, scale)
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        has_gradients = len(state["found_inf_per_device"]) > 0
        if not (has_gradients or takes_scale or self.allow_no_grads):
            raise AssertionError(
                "No inf checks were recorded for this optimizer: none of its parameters has a "
                "gradient. Did you call scaler.scale(loss).backward()? If you did, was zero_grad() "
                "called after it, or are they the parameters of another model? If it is intended, "
                "pass GradScaler(allow_no_grads=True)"
            )
        signals = self._note_step(optimizer, state)
        if not (takes_flag or has_gradients):
            result = optimizer.step(*args, **kwargs)
        elif not takes_flag:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        else:
            result = step_with(optimizer, signals, args, kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _unscale(self, optimizer: Optimizer) -> None:
        scale, _ = self._check_scale_growth_tracker("unscale_")
        self._check_scaled("unscale_")
        state = self._current_state(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Is "
                "scaler.update() missing?"
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._watch.note_scaled_gradients(optimizer, scale)
        inv_scale = scale.double().reciprocal().float()
        found_inf = torch.zeros_like(scale)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, found_inf, False)
        state["stage"] = OptState.UNSCALED
        self._watch.note_unscaling(optimizer, state)

    def _signals(
        self, state: dict[str, Any], found_inf: Tensor, inspection: Inspection | None
    ) -> Signals:
        """Return what is known about an optimizer's gradients, which may still be scaled."""
        if state["stage"] is OptState.UNSCALED:  # the norms may have changed since
            return Signals(None, found_inf)
        if inspection is None:  # a derived class has overridden _unscale_grads_
            return Signals(self._get_scale_async(), found_inf)
        norms = inspection.total_norms if inspection.is_scaled else None
        return Signals(self._get_scale_async(), found_inf, norms, inspection.backward_norms)

    def _update(self, scale: Tensor, growth_tracker: Tensor) -> None:
        """Update the scale, as the flags of all steps since the last update demand."""
        found_infs = [
            move_to(flag, scale.device)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not found_infs and not self.allow_no_grads:
            raise AssertionError(
                "No inf checks were recorded prior to update: no optimizer with gradients was "
                "stepped or unscaled by the scaler since the last update. Did you call "
                "scaler.scale(loss).backward() and scaler.step(optimizer)? If you did, was "
                "zero_grad() called between them, or are the optimizer's parameters those of "
                "another model? If it is intended, pass GradScaler(allow_no_grads=True)"
            )
        if found_infs:
            counters, history = self._history.tensors(scale.device)
            norm, norms = None, self._norm_statistics(scale.device)
            if history is not None or norms is not None:
                norm = unscaled_norm(self._inspections.values(), scale)
            ops.update_scale(
                scale,
                growth_tracker,
                counters,
                found_infs,
                growth_factor=self._growth_factor,
                backoff_factor=self._backoff_factor,
                growth_interval=self._growth_interval,
                history=history,
                norm=norm,
                norms=None if norm is None else norms,
                **self.policy.options,
            )
            self._watch.note_update(self, self._history, scale)
        self._has_announced = self._has_scaled = False
        self._per_optimizer_states.clear()
        self._inspections.clear()
        if self.max_consecutive_skips is not None:
            self._history.raise_if_collapsed(self.max_consecutive_skips)

    # --- steps of graphs, and steps that failed -------------------------------------------------

    def note_replay(self, captured: ScalerSnapshot | None) -> None:
        """Record that a graph was replayed.

        Args:
            captured: The snapshot that was taken after the capture.

        Raises:
            ScaleCollapseError: `max_consecutive_skips` steps in a row overflowed.
        """
        if captured is None:
            return
        self._history.put_last_step(captured.history.last_step)
        if self.max_consecutive_skips is not None:
            self._history.raise_if_collapsed(self.max_consecutive_skips)

    def forget(self, optimizer: Optimizer) -> None:
        """Discard what was recorded for an optimizer, since its step failed: no update follows.

        Args:
            optimizer: The optimizer whose step failed.
        """
        if self._enabled:
            self._per_optimizer_states.pop(id(optimizer), None)
            self._inspections.pop(id(optimizer), None)

    # --- private methods of torch's class -------------------------------------------------------

    def _traced_scale_on(self, device: torch.device) -> Tensor:
        self._make_scale(device)
        assert self._scale is not None
        return move_to(self._scale, device)

    @traced_as(_traced_scale_on)
    def _scale_on(self, device: torch.device) -> Tensor:
        self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return move_to(self._scale, device)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Create the scale like torch's method of this name, unless it exists already.

        The first to need it may be a loss that is evaluated in inference mode. Autograd could not
        save a scale that was created there.
        """
        if self._scale is None:
            with torch.inference_mode(False):
                super()._lazy_init_scale_growth_tracker(dev)
                assert self._scale is not None
                self._history.tensors(self._scale.device)
                self._norm_statistics(self._scale.device)

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return torch's record of what was done with the optimizer since the last update."""
        states = self._per_optimizer_states
        if id(optimizer) not in states:  # torch.compile does not trace torch's function for this
            states[id(optimizer)] = {"stage": OptState.READY, "found_inf_per_device": {}}
        return states[id(optimizer)]

    def _current_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the record of `_state_of`; gradients that follow a load count as scaled."""
        self._forget_unscaling_before_load(optimizer)
        return self._state_of(optimizer)

    @eager_only
    def _forget_unscaling_before_load(self, optimizer: Optimizer) -> None:
        """Unscale gradients that are computed after a load, whatever was unscaled before it."""
        state = self._per_optimizer_states.get(id(optimizer))
        if state is not None and state.get("is_loaded") and has_new_gradients(state):
            self.forget(optimizer)

    @at_compile_time
    def _make_scale(self, device: torch.device) -> None:
        """Create the scale, the counters and the history before a graph reads them."""
        self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        norms = self._norm_statistics(self._scale.device)
        tensors = self._history.tensors(self._scale.device)
        make_static([self._scale, self._growth_tracker, *tensors, norms])

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Return scale and growth tracker like torch's method of this name.

        In a process group, some ranks may have no loss to scale, for example the first stages of a
        pipeline. Their scale is created here, and then changes like that of the other ranks.
        """
        if self._scale is None and self.process_group is not None:
            self._scale_on(torch.device(self._device))
        if self._scale is None or self._growth_tracker is None:
            raise AssertionError(
                f"Attempted {funcname} but _scale is None: no loss was scaled. Did you "
                "call scaler.scale(loss).backward(), or pass scaler= to ampfuse.accumulate?"
            )
        return self._scale, self._growth_tracker

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _live_scale(self) -> Tensor:
        if not self._enabled:
            return torch.ones((), dtype=torch.float32)
        self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None
        return self._scale

    def _announce_scale(self) -> Tensor:
        """Return the scale for a loss module, whose loss is to be scaled by it."""
        if torch.is_grad_enabled():
            self._has_announced = True
            if self._enabled:
                self._watch.note_announced()
        return self._live_scale()

    def _has_scaled_gradients(self) -> bool:
        """Return True between a scaled loss and the step."""
        stages = [state["stage"] for state in self._per_optimizer_states.values()]
        return self._has_scaled and OptState.STEPPED not in stages

    @eager_only
    def _check_scaled(self, funcname: str) -> None:
        """Raise if since the last update only loss modules have used the scale.

        A program that knows the scale may multiply by it, and so may a `scale` of its own class.
        """
        if self._has_scaled or not self._has_announced or self._watch.is_scale_known:
            return
        if self.scales_by_itself():
            raise AssertionError(
                f"Attempted {funcname} but no loss was scaled since the last update, although a "
                "loss module with scaler= was called. Did you call scaler.scale(loss).backward()?"
            )

    def scales_by_itself(self) -> bool:
        """Return False if a derived class has a `scale` of its own."""
        is_own = type(self).scale is type(self)._own_scale  # type: ignore[attr-defined]
        return is_own and "scale" not in vars(self)

    def _note_step(self, optimizer: Optimizer, state: dict[str, Any]) -> Signals:
        """Record a step; return its signals, whose flag is on the scale's device."""
        assert self._scale is not None
        flags = state["found_inf_per_device"].values()
        if flags:
            found_inf = largest([move_to(flag, self._scale.device) for flag in flags])
        else:  # no gradients, so no overflow
            found_inf = torch.zeros_like(self._scale)
        norms = self._norm_statistics(self._scale.device)
        if norms is not None:
            state["outlier"] = self._outlier(optimizer, norms)
            found_inf = torch.maximum(found_inf, state["outlier"])
        inspection = self._inspections.get(id(optimizer))
        self._watch.look_at_step(optimizer, state, inspection, self)
        self._history.note_step(found_inf, inspection)
        return self._signals(state, found_inf, inspection)

    def _norm_statistics(self, device: torch.device) -> Tensor | None:
        if self.policy.skip_outliers is None:
            return None
        return self._history.statistics(device)

    def _outlier(self, optimizer: Optimizer, norms: Tensor) -> Tensor:
        """Return a flag on the scale's device: 1 if the norm of the gradients is an outlier."""
        assert self._scale is not None
        if len(self._per_optimizer_states) > 1:
            raise ValueError(
                "skip_outliers: expected one optimizer between two updates, got "
                f"{len(self._per_optimizer_states)}"
            )
        inspection = self._inspections.get(id(optimizer))
        norm = None if inspection is None else norm_or_refuse(inspection, self._scale)
        if norm is None:
            return torch.zeros_like(self._scale)
        return (norm > norms[3]).float()

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale like torch's method of this name, and record the norms from the same pass.

        `found_inf` is not changed; the returned flags are new tensors.
        """
        return self._inspect(optimizer, inv_scale, found_inf.clone(), allow_fp16, None)

    def _inspect(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
        known: BackwardNorms | None,
    ) -> dict[torch.device, Tensor]:
        with torch.no_grad():
            gradients = gradients_of(optimizer, allow_fp16 or self._allow_fp16_grads)
            flags, inspection = inspect(gradients, inv_scale, found_inf, self.process_group, known)
            if self.policy.skip_outliers is not None:
                add_norm_of_shards(gradients, inspection)
        self._inspections[id(optimizer)] = inspection
        return flags

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        """Check gradients that are still scaled, like torch's method of this name."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        found_inf, one = flag_without_inverse(scale), torch.ones_like(scale)
        known = BackwardNorms.find(optimizer)
        # Derived classes override this, and programs replace it on a scaler.
        is_own = getattr(self._unscale_grads_, "__func__", None) is DeviceScaler._unscale_grads_
        if known is None and not is_own:
            flags = self._unscale_grads_(optimizer, one, found_inf, True)
        else:
            flags = self._inspect(optimizer, one, found_inf, True, known)
        self._state_of(optimizer)["found_inf_per_device"] = flags
        inspection = self._inspections.get(id(optimizer))
        if inspection is not None:  # a derived class may override _unscale_grads_
            inspection.is_scaled = True
        return flags

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step unless a flag is set, like torch's method of this name.

        This is the only place in a step where the host waits, once for all devices.
        """
        flags = list(optimizer_state["found_inf_per_device"].values())
        if "outlier" in optimizer_state:
            flags.append(optimizer_state["outlier"])
        return None if largest(flags).item() else optimizer.step(*args, **kwargs)
