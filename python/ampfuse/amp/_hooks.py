"""Our versions of the private methods of torch's GradScaler.

torch.compile does not trace the methods of torch's class. So all that a step needs is here or in
classes that derive from `Hooks`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ampfuse._capture import is_capturing
from ampfuse._compiling import at_compile_time, make_static
from ampfuse._mistakes import Watch
from ampfuse.amp._gradients import Inspection, gather, inspect
from ampfuse.amp._memory import Memory
from ampfuse.amp._tensor_step import skips_unseen, step_with_tensors
from ampfuse.optim import Adam
from ampfuse.optim._columns import on_device
from ampfuse.optim._grad_norm import largest

# The inverse of this and of smaller scales is not a finite float32 (see csrc/math/fused_adam.h).
LARGEST_WITHOUT_INVERSE = 2.0**-128


class Hooks(TorchGradScaler):
    """The methods that inspect gradients and keep the scale."""

    _memory: Memory
    _inspections: dict[int, Inspection]  # by the optimizer's id, until the next update
    _watch: Watch
    _allow_fp16_grads: bool
    process_group: Any

    def _scale_on(self, device: torch.device) -> Tensor:
        if torch.compiler.is_compiling():
            self._make_scale(device)
        elif self._scale is None:
            self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return on_device(self._scale, device)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        """Create the scale like torch's method of this name, unless it exists already."""
        if self._scale is None:
            super()._lazy_init_scale_growth_tracker(dev)
            assert self._scale is not None
            self._memory.tensors(self._scale.device)

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return torch's record of what was done with the optimizer since the last update."""
        states = self._per_optimizer_states
        if torch.compiler.is_compiling() and id(optimizer) not in states:
            # The compiler does not trace the function of torch that creates missing entries.
            states[id(optimizer)] = {"stage": OptState.READY, "found_inf_per_device": {}}
        return states[id(optimizer)]

    def _forget(self, optimizer: Optimizer) -> None:
        """Discard what was recorded for the optimizer, since no update will follow."""
        self._per_optimizer_states.pop(id(optimizer), None)
        self._inspections.pop(id(optimizer), None)

    @at_compile_time
    def _make_scale(self, device: torch.device) -> None:
        """Create the scale, the counters and the history before a graph reads them."""
        self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        make_static([self._scale, self._growth_tracker, *self._memory.tensors(self._scale.device)])

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[Tensor, Tensor]:
        """Return scale and growth tracker like torch's method of this name.

        Some ranks that skip together may have no loss to scale, for example the first stages of a
        pipeline. Their scale is created here, and changes like that of the other ranks.
        """
        if self._scale is None and self.process_group is not None:
            self._scale_on(torch.device(self._device))
        if self._scale is None or self._growth_tracker is None:
            return super()._check_scale_growth_tracker(funcname)  # raises
        return self._scale, self._growth_tracker

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def get_scale(self) -> float:
        """Return the scale as a number, for which the host waits; 1 if the scaler is disabled."""
        if self._enabled and not torch.compiler.is_compiling():
            self._watch.is_scale_known = True
        scale: float = super().get_scale()
        return scale

    def _live_scale(self) -> Tensor:
        if not self._enabled:
            return torch.ones((), dtype=torch.float32)
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None
        return self._scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, and check whether any is non-finite.

        Call this at most once before a step, and only if the program uses the unscaled gradients:
        `step` unscales by itself.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Is "
                "scaler.update() missing?"
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._look_for_mistakes(optimizer)
        inv_scale = scale.double().reciprocal().float()
        found_inf = torch.zeros_like(scale)
        state["found_inf_per_device"] = self._unscale_grads_(optimizer, inv_scale, found_inf, False)
        state["stage"] = OptState.UNSCALED

    def _look_for_mistakes(self, optimizer: Optimizer) -> None:
        """Check an optimizer's gradients, which must still be scaled, for common mistakes."""
        if not torch.compiler.is_compiling() and not is_capturing():
            assert self._scale is not None
            params = (param for group in optimizer.param_groups for param in group["params"])
            grads = (param.grad for param in params if param.grad is not None)
            self._watch.note_scaled_gradients(grads, self._scale)

    def _look_for_second_clipping(
        self, optimizer: Optimizer, inspection: Inspection | None
    ) -> None:
        if torch.compiler.is_compiling() or is_capturing() or not isinstance(optimizer, Adam):
            return
        limit = optimizer.max_grad_norm
        if limit is not None and inspection is not None and len(inspection.total_norms) == 1:
            (scaled_norm,) = inspection.total_norms.values()
            assert self._scale is not None
            self._watch.note_limit(scaled_norm, limit, self._scale)

    def _note_step(self, optimizer: Optimizer, state: dict[str, Any]) -> Tensor:
        """Record and return the flag by which the step is skipped, on the scale's device."""
        assert self._scale is not None
        flags = state["found_inf_per_device"].values()
        if flags:
            found_inf = largest([on_device(flag, self._scale.device) for flag in flags])
        else:  # no gradients, so no overflow
            found_inf = torch.zeros_like(self._scale)
        self._memory.note_step(found_inf, self._inspections.get(id(optimizer)))
        return found_inf

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale like torch's method of this name, and record the norms from the same pass.

        `found_inf` is not changed; the returned flags are new tensors.
        """
        with torch.no_grad():
            gradients = gather(optimizer, allow_fp16 or self._allow_fp16_grads)
            flag = found_inf.clone()
            flags, inspection = inspect(gradients, inv_scale, flag, self.process_group)
        self._inspections[id(optimizer)] = inspection
        return flags

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        """Check gradients that are still scaled, like torch's method of this name."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        # A scale without a finite inverse counts as an overflow, whatever the gradients are. The
        # quotient, rounded down, is non-zero for exactly these scales.
        found_inf = LARGEST_WITHOUT_INVERSE // scale
        flags = self._unscale_grads_(optimizer, torch.ones_like(scale), found_inf, True)
        self._state_of(optimizer)["found_inf_per_device"] = flags
        self._inspections[id(optimizer)].is_scaled = True
        return flags

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Step unless a flag is set, like torch's method of this name.

        The host waits here, once for all devices, and nowhere else. It does not wait for an `Adam`
        that can skip on the device without any code noticing.
        """
        found_inf = largest(list(optimizer_state["found_inf_per_device"].values()))
        if skips_unseen(optimizer, args, kwargs):
            inspection = self._inspections.get(id(optimizer))
            return step_with_tensors(optimizer, None, found_inf, inspection, args, kwargs)
        return None if found_inf.item() else optimizer.step(*args, **kwargs)
