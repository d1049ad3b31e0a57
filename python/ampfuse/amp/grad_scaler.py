"""GradScaler: like torch's, but without host waits, and with limits, hysteresis and a history."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ampfuse import ops
from ampfuse._graphs import at_compile_time, is_in_graph, make_static, traced_as
from ampfuse._nested import params_of
from ampfuse._warning import warn_caller
from ampfuse.amp import _policy
from ampfuse.amp._gate import Gate
from ampfuse.amp._history import ScaleRecord, ScalerHistory
from ampfuse.amp._policy import Policy, torchs_options
from ampfuse.amp._saved import COUNTERS, NORMS, check_pickled, loaded
from ampfuse.amp._tensor_step import (
    may_skip_on_device,
    step_with_tensors,
    takes_tensors,
    wants_the_scaler,
)
from ampfuse.clip_grad import clip_grad_norm_, clip_grads_with_norm_
from ampfuse.gradients.backward_norms import BackwardNorms
from ampfuse.gradients.devices import largest, on_device
from ampfuse.gradients.inspection import (
    Inspection,
    add_norm_of_shards,
    gradients_of,
    inspect,
    norm_for,
    norm_or_refuse,
    unscaled_norm,
)
from ampfuse.gradients.lists import groups_of
from ampfuse.gradients.mistakes import Watch
from ampfuse.optim import Adam

# The inverse of this and of smaller scales is not a finite float32 (see csrc/math/fused_adam.h).
LARGEST_SCALE_WITHOUT_INVERSE = 2.0**-128


class GradScaler(TorchGradScaler):
    """A `torch.amp.GradScaler` that makes the host wait for the device only where it must.

    Arguments, attributes, private hooks, state dict and error messages are torch's, with additions.
    Steps of optimizers that take scale and flag as tensors (`ampfuse.Adam`, `AdamW`, torch's with
    `fused=True`) make no host wait. For other optimizers the host waits once per step.

    How each `update()` changes the scale:

        overflow ──▶ hysteresis tracker above 1? ──yes──▶ it decreases by one; the scale stays
                         │ no
                         └──▶ scale ← max(backoff_factor · scale, min_scale)
        no overflow ──▶ growth_interval such steps in a row?
                         │ yes ──▶ scale ← min(growth_factor · scale, max_scale)
                         └ no ──▶ the scale stays

    | hysteresis_refill       | hysteresis is restored by | as in                            |
    | ----------------------- | ------------------------- | -------------------------------- |
    | `"growth"`              | growth of the scale       | Megatron-LM, DeepSpeed           |
    | `"clean_step"`          | any step without overflow | apex; DeepSpeed with             |
    |                         |                           | consecutive_hysteresis           |

    States of each optimizer: READY ─unscale_()─▶ UNSCALED ─step()─▶ STEPPED ─update()─▶ READY. In
    the state READY, step() unscales the gradients itself, or the optimizer does.

    Args:
        device: Type of the device, for example `"cuda"` or `"cpu"`. The scale is created on the
            device of the first loss, or on this one if it is needed before.
        init_scale: The first scale, a finite number above 0.
        growth_factor: The factor, above 1, by which the scale grows.
        backoff_factor: The factor, between 0 and 1, by which the scale backs off.
        growth_interval: Number of steps in a row without overflow after which the scale grows.
        enabled: If False, losses are not scaled and `step` only calls `optimizer.step()`.
        min_scale: The lower limit of backing off, or None.
        max_scale: The upper limit of growing, or None.
        hysteresis: Number of overflows that it takes to lower the scale (1: every overflow does).
        hysteresis_refill: `"growth"` or `"clean_step"`, as in the table above.
        dynamic: False keeps the scale constant; steps that overflow are still skipped.
        skip_outliers: Also skip a step if the norm of its gradients is an outlier: its logarithm is
            more than so many standard deviations, for example 6, above a running mean. The first 64
            finite norms are no outliers. Outliers do not change the scale. Only one optimizer is
            allowed.
        max_consecutive_skips: `update()` raises `ScaleCollapseError` after this many overflows in a
            row. On a GPU it checks the last count that has arrived on the host. So the error may
            come some steps late, or not at all if a step was taken since. The scale has been
            updated nevertheless, and training may go on.
        history: Number of last updates that `history()` returns.
        process_group: Ranks with different gradients, which all skip a step if one overflows.
        allow_fp16_grads: Unscale float16 gradients, too, for optimizers that have masters.
        allow_no_grads: Stepping an optimizer without gradients is not an error.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.
        AssertionError: `growth_factor` or `backoff_factor` is out of range, as in torch.

    Examples:
        >>> import torch, ampfuse
        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = ampfuse.AdamW(model.parameters(), max_grad_norm=1.0)
        >>> scaler = ampfuse.GradScaler("cpu", history=100)
        >>> scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> scaler.history()[0].scale, scaler.was_skipped()
        (65536.0, False)
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        hysteresis_refill: str = "growth",
        dynamic: bool = True,
        skip_outliers: float | None = None,
        max_consecutive_skips: int | None = None,
        history: int = 0,
        process_group: Any = None,
        allow_fp16_grads: bool = False,
        allow_no_grads: bool = False,
    ) -> None:
        if not isinstance(device, str | torch.device):
            raise TypeError(f"device: expected a str like 'cuda', got {device!r}")
        device = device.type if isinstance(device, torch.device) else device
        TorchGradScaler.__init__(  # not super(), since derived classes may have other bases
            self, device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.max_consecutive_skips = max_consecutive_skips
        self.process_group = process_group
        if not self._enabled:
            self._policy = Policy()  # set_growth_factor() etc. read it
            return
        self._policy = Policy(
            min_scale, max_scale, hysteresis, hysteresis_refill, dynamic, skip_outliers
        )
        self._policy.check_process_group(process_group)
        self._init_scale = _policy.checked_scale("init_scale", init_scale)
        self._growth_factor, self._backoff_factor, self._growth_interval = torchs_options(
            self._policy, growth_factor, backoff_factor, growth_interval
        )
        self._policy.check_initial(self._init_scale)
        if max_consecutive_skips is not None:
            _policy.checked_count("max_consecutive_skips", max_consecutive_skips, least=1)
        self._allow_fp16_grads = allow_fp16_grads
        self._allow_no_grads = allow_no_grads
        self._history = ScalerHistory(
            [self._policy.hysteresis, 0, 0], _policy.checked_count("history", history, least=0)
        )
        self._inspections: dict[int, Inspection] = {}  # by the optimizer's id, until next update
        self._watch = Watch()

    # --- gradients ------------------------------------------------------------------------------

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss by the scale, on the loss's device. The host does not wait.

        Args:
            outputs: A tensor, or an iterable of tensors, which may be nested.

        Returns:
            The products in new tensors. Lists and tuples keep their type; other iterables become
            generators. If the scaler is disabled, `outputs` itself.

        Raises:
            ValueError: `outputs` is neither a tensor nor an iterable.
        """
        if not self._enabled:
            return outputs
        self._watch.note_scaled_loss()
        return scaled(outputs, self._scale_on)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale in place, and check whether any is non-finite.

        Call this at most once before a step, and only if the program uses the unscaled gradients:
        `step` unscales by itself. The host does not wait.

        Args:
            optimizer: The optimizer whose parameters' gradients are divided.

        Raises:
            RuntimeError: `unscale_` or `step` was already called since the last `update()`.
            ValueError: A gradient is float16, and `allow_fp16_grads` is False.
            AssertionError: No loss has been scaled yet.
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

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` on unscaled gradients; skip if any is non-finite.

        The host waits once for the check, except for optimizers that take `grad_scale` and
        `found_inf` as tensors (`ampfuse.Adam`, `AdamW`, torch's with `fused=True`), which skip on
        the device.
        `was_skipped()` reports whether the step was skipped.

        Args:
            optimizer: The optimizer that steps. Its gradients are unscaled here, unless `unscale_`
                or `clip_grad_norm_` did so. `ampfuse.Adam` and `AdamW` leave them scaled in
                `.grad`, unless `write_back_grads` is set.
            *args: Passed to `optimizer.step`.
            **kwargs: Passed to `optimizer.step`. The keyword `closure` is refused.

        Returns:
            The result of `optimizer.step`; None if the step was skipped by the host.

        Raises:
            RuntimeError: `step` was already called since the last `update()`, or has the keyword
                `closure`.
            AssertionError: No loss has been scaled; or no parameter has a gradient, and the
                optimizer does not take scale and flag as tensors.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update(). Is scaler.update() "
                "missing?"
            )
        if takes_tensors(optimizer) and wants_the_scaler(optimizer):
            if self._policy.skip_outliers is not None:
                raise TypeError(
                    "skip_outliers: expected None for an optimizer whose step takes grad_scaler"
                )
            result = super().step(optimizer, *args, **kwargs)
            self._note_step(optimizer, state)
            return result
        return self._step(optimizer, state, args, kwargs)

    def _step(self, optimizer: Optimizer, state: dict[str, Any], args: Any, kwargs: Any) -> Any:
        """Step an optimizer that may take scale and flag as tensors, but not the scaler."""
        skips_itself = takes_tensors(optimizer)
        if state["stage"] is OptState.READY:
            if skips_itself:
                self._look_for_mistakes(optimizer)
                self._check_inf_per_device(optimizer)
            else:
                self.unscale_(optimizer)
        has_gradients = len(state["found_inf_per_device"]) > 0
        if not (has_gradients or skips_itself or self._allow_no_grads):
            raise AssertionError(
                "No inf checks were recorded for this optimizer: none of its parameters has a "
                "gradient. Did you call scaler.scale(loss).backward()? If it is intended, pass "
                "GradScaler(allow_no_grads=True)"
            )
        found_inf = self._note_step(optimizer, state)
        if skips_itself:
            scale, inspection = None, self._inspections.get(id(optimizer))
            if state["stage"] is OptState.READY:
                scale = self._get_scale_async()
                self._look_for_second_clipping(optimizer, inspection)
            result = step_with_tensors(optimizer, scale, found_inf, inspection, args, kwargs)
        elif has_gradients:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        else:
            result = optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def clip_grad_norm_(self, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Unscale gradients in place, and clip their norm to `max_norm`.

        Call this between `backward()` and `step`. The host does not wait. One pass unscales the
        gradients and computes their norm; if `unscale_` was called before, they are read once more.
        They are written again only if the norm is above `max_norm`. An
        `ampfuse.AdamW(max_grad_norm=...)` clips inside its step, which costs less.

        Args:
            optimizer: The optimizer whose parameters' gradients are clipped, all by one norm.
            max_norm: The largest norm of the unscaled gradients.

        Returns:
            The norm of the unscaled gradients before clipping, 0-dim, on their device.

        Raises:
            RuntimeError: `step` was called since the last `update()`.
            ValueError: A gradient is float16, and `allow_fp16_grads` is False.

        Examples:
            >>> import torch, ampfuse
            >>> param = torch.nn.Parameter(torch.zeros(2))
            >>> optimizer, scaler = torch.optim.SGD([param], lr=1.0), ampfuse.GradScaler("cpu")
            >>> scaler.scale((param * torch.tensor([3.0, 4.0])).sum()).backward()
            >>> scaler.clip_grad_norm_(optimizer, max_norm=1.0), param.grad
            (tensor(5.), tensor([0.6000, 0.8000]))
        """
        params = [param for group in groups_of(optimizer) for param in group["params"]]
        if self._enabled and self._state_of(optimizer)["stage"] is not OptState.UNSCALED:
            self.unscale_(optimizer)
            inspection = self._inspections.get(id(optimizer))
            total_norm = None if inspection is None else norm_for(params, inspection)
            if total_norm is not None:
                clip_grads_with_norm_(params, max_norm, total_norm)
                return total_norm
        return clip_grad_norm_(params, max_norm)

    # --- the scale ------------------------------------------------------------------------------

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Update the scale after the steps since the last update. The host does not wait.

        Args:
            new_scale: Set the scale to this number, or to this tensor with one element, instead.

        Raises:
            AssertionError: No optimizer with gradients was stepped or unscaled since the last
                update.
            TypeError: `new_scale` is neither a number nor a tensor.
            ValueError: `new_scale` is a number that is not finite and above 0.
            ScaleCollapseError: `max_consecutive_skips` steps in a row overflowed.
        """
        if not self._enabled:
            return
        scale, growth_tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            if not isinstance(new_scale, Tensor):
                new_scale = _policy.checked_scale("new_scale", new_scale)
            elif new_scale.numel() == 1:
                new_scale = new_scale.reshape(())
            super().update(new_scale)
            self._inspections.clear()
            return
        found_infs = [
            on_device(flag, scale.device)
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        if not found_infs and not self._allow_no_grads:
            raise AssertionError(
                "No inf checks were recorded prior to update: no optimizer with gradients was "
                "stepped or unscaled by the scaler since the last update. Did you call "
                "scaler.scale(loss).backward() and scaler.step(optimizer)? If it is intended, pass "
                "GradScaler(allow_no_grads=True)"
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
                **self._policy.options,
            )
        self._per_optimizer_states.clear()
        self._inspections.clear()
        self._history.raise_if_collapsed(self.max_consecutive_skips)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows.

        Args:
            new_factor: At least 1; with 1 the scale never grows.

        Raises:
            ValueError: The factor is out of range.
        """
        self._growth_factor = torchs_options(self._policy, growth_factor=new_factor)[0]

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off.

        Args:
            new_factor: Above 0 and at most 1; with 1 the scale never backs off.

        Raises:
            ValueError: The factor is out of range.
        """
        self._backoff_factor = torchs_options(self._policy, backoff_factor=new_factor)[1]

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of steps in a row without overflow after which the scale grows.

        Args:
            new_interval: At least 1.

        Raises:
            ValueError: The interval is out of range.
        """
        self._growth_interval = torchs_options(self._policy, growth_interval=new_interval)[2]

    def get_scale(self) -> float:
        """Return the scale as a number, for which the host waits; 1 if the scaler is disabled."""
        if self._enabled:
            self._watch.note_known_scale()
        scale: float = super().get_scale()
        return scale

    def scale_tensor(self) -> Tensor:
        """Return the live scale, 0-dim float32, to pass as a `grad_scale`; create it if needed."""
        if self._enabled:
            self._watch.note_known_scale()
        return self._live_scale()

    # --- what happened --------------------------------------------------------------------------

    @property
    def step_skipped(self) -> Tensor:
        """A 0-dim bool tensor, on the scale's device after a step: True if it was skipped."""
        return self._history.step_skipped() if self._enabled else torch.tensor(False)

    def was_skipped(self) -> bool:
        """Return True if the last step was skipped. The host waits for the check of that step.

        With several optimizers, this is the step of the one that was stepped last.
        """
        return self._enabled and self._history.was_skipped()

    def gate(self, scheduler: Any) -> Gate:
        """Return a learning rate scheduler that stands still when steps are skipped.

        Call its `step()` once after each `update()`; a scheduler that is stepped by epochs needs no
        gate. There may be one optimizer. On a GPU the scheduler follows when it is known that a
        step was taken, some steps later; the host waits only if it is more than 16 steps ahead.
        `wait()` lets the scheduler follow all steps, for example before the optimizer's state,
        which has the rate, is saved; ampfuse.checkpoint does.

        Args:
            scheduler: A scheduler of `torch.optim.lr_scheduler`, of the optimizer that is stepped.

        Returns:
            An object with the methods `step`, `wait`, `state_dict` and `load_state_dict`, and with
            the scheduler's other attributes.

        Raises:
            TypeError: The scheduler is a ReduceLROnPlateau.

        Examples:
            >>> import torch, ampfuse
            >>> optimizer = ampfuse.AdamW([torch.nn.Parameter(torch.ones(2))], lr=1.0)
            >>> scaler = ampfuse.GradScaler("cpu")
            >>> scheduler = scaler.gate(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            >>> for factor in (1.0, float("inf"), 1.0):
            ...     optimizer.zero_grad()
            ...     scaler.scale(optimizer.param_groups[0]["params"][0].sum() * factor).backward()
            ...     scaler.step(optimizer)
            ...     scaler.update()
            ...     scheduler.step()
            >>> scheduler.get_last_lr()
            [0.25]
        """
        return Gate(scheduler, self)

    def history(self) -> list[ScaleRecord]:
        """Return the last updates, oldest first. The host waits for one copy.

        Returns:
            At most `history` records; none if the scaler is disabled or was made without
            `history=`.
        """
        if not self._enabled:
            return []
        if self._history.length == 0:
            warn_caller(
                "history(): this GradScaler remembers no updates; make it with "
                "GradScaler(history=100) to remember the last 100"
            )
        return self._history.records()

    def overflow_report(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the parameters with non-finite gradients in the last skipped step.

        The last 16 steps are searched, or only the last one if it was compiled or captured; the
        list is empty if all of them were taken. So call this if `was_skipped()` returns True. The
        host waits for the result.

        Args:
            model: The model that names the parameters.

        Returns:
            Names as in `model.named_parameters()`.
        """
        if not self._enabled:
            return []
        found = self._history.offenders()
        return [name for name, param in model.named_parameters() if id(param) in found]

    # --- saving ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for example for a checkpoint. The host waits for the numbers.

        Returns:
            torch's five entries, which torch's scaler can load, and further options and counters;
            without the history. It is empty if the scaler is disabled.
        """
        if not self._enabled:
            return {}
        own: dict[str, float] = dict(zip(COUNTERS, self._history.counts(), strict=True))
        with self._watch.unnoticed():
            own |= zip(NORMS, self._history.norms(), strict=True)
            return {**super().state_dict(), **self._policy.options, **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or torch's. Options that it lacks stay unchanged.

        Nothing is loaded if an entry of torch's is missing or any entry is invalid.

        Args:
            state_dict: The result of `state_dict()` of a scaler that was enabled.

        Raises:
            KeyError: An entry of torch's is missing.
            TypeError: An entry has a wrong type.
            ValueError: An entry is out of range, or `skip_outliers` is set, which a scaler with a
                process group cannot have.
            RuntimeError: The state dict is empty, as that of a disabled scaler is.
        """
        torchs = state_dict
        if self._enabled and state_dict:
            here = self._policy, self._history.counts(), self._history.norms()
            state = loaded(state_dict, *here)
            state.policy.check_process_group(self.process_group)
            self._policy, torchs = state.policy, state.torchs
            self._history.set_counts(state.counts)
            self._history.set_norms(state.norms)
        super().load_state_dict(torchs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy. Tensors are created again when needed."""
        if not self._enabled:
            return super().__getstate__()
        with self._watch.unnoticed():
            state = super().__getstate__()
            state["_history"] = self._history.on_host()
            state["_inspections"] = {}
            del state["_watch"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state for pickle and deepcopy."""
        check_pickled(state)
        super().__setstate__(state)
        if self._enabled:
            self._watch = Watch()

    def __deepcopy__(self, memo: dict[int, Any]) -> "GradScaler":
        """Copy the scaler; the copy has the same process group."""
        memo[id(self.process_group)] = self.process_group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    # --- private methods of torch's class -------------------------------------------------------

    # torch.compile does not trace the methods of torch's class, so all that a step needs is here.

    def _traced_scale_on(self, device: torch.device) -> Tensor:
        self._make_scale(device)
        assert self._scale is not None
        return on_device(self._scale, device)

    @traced_as(_traced_scale_on)
    def _scale_on(self, device: torch.device) -> Tensor:
        self._lazy_init_scale_growth_tracker(device)
        assert self._scale is not None
        return on_device(self._scale, device)

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

    def _forget(self, optimizer: Optimizer) -> None:
        """Discard what was recorded for the optimizer, since no update will follow."""
        self._per_optimizer_states.pop(id(optimizer), None)
        self._inspections.pop(id(optimizer), None)

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
            return super()._check_scale_growth_tracker(funcname)  # raises
        return self._scale, self._growth_tracker

    def _get_scale_async(self) -> Tensor | None:
        return self._scale

    def _live_scale(self) -> Tensor:
        if not self._enabled:
            return torch.ones((), dtype=torch.float32)
        self._lazy_init_scale_growth_tracker(torch.device(self._device))
        assert self._scale is not None
        return self._scale

    def _look_for_mistakes(self, optimizer: Optimizer) -> None:
        """Check an optimizer's gradients, which must still be scaled, for common mistakes."""
        if not is_in_graph():
            assert self._scale is not None
            grads = (param.grad for param in params_of(optimizer) if param.grad is not None)
            self._watch.note_scaled_gradients(grads, self._scale)

    def _look_for_second_clipping(
        self, optimizer: Optimizer, inspection: Inspection | None
    ) -> None:
        if is_in_graph() or not isinstance(optimizer, Adam):
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
        norms = self._norm_statistics(self._scale.device)
        if norms is not None:
            state["outlier"] = self._outlier(optimizer, norms)
            found_inf = torch.maximum(found_inf, state["outlier"])
        self._history.note_step(found_inf, self._inspections.get(id(optimizer)))
        return found_inf

    def _norm_statistics(self, device: torch.device) -> Tensor | None:
        if self._policy.skip_outliers is None:
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
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Unscale like torch's method of this name, and record the norms from the same pass.

        `found_inf` is not changed; the returned flags are new tensors.
        """
        return self._inspect(optimizer, inv_scale, found_inf, allow_fp16, None)

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
            flag = found_inf.clone()
            flags, inspection = inspect(gradients, inv_scale, flag, self.process_group, known)
            if self._policy.skip_outliers is not None:
                add_norm_of_shards(optimizer, inspection)
        self._inspections[id(optimizer)] = inspection
        return flags

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        """Check gradients that are still scaled, like torch's method of this name."""
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        # A scale without a finite inverse counts as an overflow, whatever the gradients are. The
        # quotient, rounded down, is non-zero for exactly these scales.
        found_inf = LARGEST_SCALE_WITHOUT_INVERSE // scale
        known = None if is_in_graph() else getattr(optimizer, "_backward_norms", None)
        one = torch.ones_like(scale)
        if known is None:
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

        This is the only place in a step where the host waits, once for all devices. It does not
        wait for an `Adam` that skips on the device, if no code can notice the difference.
        """
        flags = list(optimizer_state["found_inf_per_device"].values())
        if "outlier" in optimizer_state:
            flags.append(optimizer_state["outlier"])
        found_inf = largest(flags)
        if may_skip_on_device(optimizer, args, kwargs):
            inspection = self._inspections.get(id(optimizer))
            return step_with_tensors(optimizer, None, found_inf, inspection, args, kwargs)
        return None if found_inf.item() else optimizer.step(*args, **kwargs)


def scaled(outputs: Any, scale_on: Callable[[torch.device], Tensor]) -> Any:
    """Return a tensor, or an iterable of tensors, scaled; lists and tuples keep their type.

    torch's scaler copies the scale to other devices without waiting. That is wrong for a CPU, which
    reads the copy at once, perhaps before it has arrived.
    """
    if isinstance(outputs, Tensor):
        return outputs * scale_on(outputs.device)
    if not isinstance(outputs, Iterable):
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")
    each = (scaled(output, scale_on) for output in outputs)
    return type(outputs)(each) if isinstance(outputs, (list, tuple)) else each
