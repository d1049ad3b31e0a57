"""GradScaler: like torch's, but without host waits, and with limits, hysteresis and a history."""

from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ampfuse._arguments import checked_count
from ampfuse._graphs import eager_only, groups_of
from ampfuse._warning import warn_if_no_gpu
from ampfuse.amp._device_scaler import DeviceScaler
from ampfuse.amp._history import ScalerHistory
from ampfuse.amp._policy import Policy, checked_device, checked_scale, torchs_options
from ampfuse.amp._products import scaled
from ampfuse.amp.gate import Gate
from ampfuse.clip_grad import clip_grad_norm_, clip_grads_with_norm_
from ampfuse.gradients.inspection import Inspection, norm_for
from ampfuse.gradients.mistakes import Watch
from ampfuse.optim.stepping import may_skip_on_device, step_plainly, takes_scaler, takes_tensors

NO_GPU = "torch.cuda.amp.GradScaler is enabled, but CUDA is not available.  Disabling."  # torch's


class GradScaler(DeviceScaler):
    """A `torch.amp.GradScaler` that makes the host wait for the device only where it must.

    Arguments, attributes, private hooks, state dict and error messages are torch's, with additions.
    Steps of optimizers that take scale and flag as tensors (ampfuse's, and torch's with
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
        device = checked_device(device, enabled)
        if enabled and device == "cuda" and warn_if_no_gpu(NO_GPU):  # torch would name this file
            enabled = False
        TorchGradScaler.__init__(  # not super(), since derived classes may have other bases
            self, device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self.max_consecutive_skips = max_consecutive_skips
        self.process_group = process_group
        if not self._enabled:
            self.policy = Policy()  # set_growth_factor() etc. read it
            return
        self.policy = Policy(
            min_scale, max_scale, hysteresis, hysteresis_refill, dynamic, skip_outliers
        )
        self.policy.check_process_group(process_group)
        self._init_scale = checked_scale("init_scale", init_scale)
        self._growth_factor, self._backoff_factor, self._growth_interval = torchs_options(
            self.policy, growth_factor, backoff_factor, growth_interval
        )
        self.policy.check_initial(self._init_scale)
        if max_consecutive_skips is not None:
            checked_count("max_consecutive_skips", max_consecutive_skips, least=1)
        self._allow_fp16_grads = allow_fp16_grads
        self.allow_no_grads = allow_no_grads
        self._history = ScalerHistory(
            [self.policy.hysteresis, 0, 0], checked_count("history", history, least=0)
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
            ValueError: `outputs` is neither a tensor nor an iterable, or it is a module.
        """
        if not self._enabled:
            return outputs
        self._has_scaled = True
        result = scaled(outputs, self._scale_on)
        self._watch.note_scaled_loss(outputs, result, self, self._history)
        return result

    _own_scale = scale  # derived classes may override scale

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale in place, and check whether any is non-finite.

        Call this at most once before a step, and only if the program uses the unscaled gradients:
        `step` unscales by itself. The host does not wait.

        Args:
            optimizer: The optimizer whose parameters' gradients are divided.

        Raises:
            TypeError: `optimizer` has no parameter groups.
            RuntimeError: `unscale_` or `step` was already called since the last `update()`.
            ValueError: A gradient is float16, and `allow_fp16_grads` is False.
            AssertionError: No loss has been scaled yet.
        """
        if not self._enabled:
            return
        check_is_optimizer(optimizer)
        self._unscale(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Call `optimizer.step(*args, **kwargs)` on unscaled gradients; skip if any is non-finite.

        The host waits once for the check, except for optimizers that take `grad_scale` and
        `found_inf` as tensors (ampfuse's, and torch's with `fused=True`), which skip on
        the device. The host waits for the first step of torch's fused SGD with momentum, whose
        buffers would stay uninitialised if the device skipped it. `was_skipped()` reports whether
        the step was skipped.

        Args:
            optimizer: The optimizer that steps. Its gradients are unscaled here, unless `unscale_`
                or `clip_grad_norm_` did so. Optimizers of ampfuse leave them scaled in
                `.grad`, unless `write_back_grads` is set.
            *args: Passed to `optimizer.step`.
            **kwargs: Passed to `optimizer.step`. The keyword `closure` is refused.

        Returns:
            The result of `optimizer.step`; None if the step was skipped by the host.

        Raises:
            TypeError: `optimizer` has no parameter groups.
            RuntimeError: `step` was already called since the last `update()`, or has the keyword
                `closure`.
            AssertionError: No loss has been scaled; or no parameter has a gradient, and the
                optimizer does not take scale and flag as tensors.
        """
        if not self._enabled:
            return step_plainly(optimizer, args, kwargs)
        check_is_optimizer(optimizer)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if takes_scaler(optimizer):
            if self.policy.skip_outliers is not None:
                raise TypeError(
                    "skip_outliers: expected None for an optimizer whose step takes grad_scaler"
                )
            result = super().step(optimizer, *args, **kwargs)
            self._note_step(optimizer, self._state_of(optimizer))
            return result
        takes_scale = takes_tensors(optimizer)
        # A derived class may override torch's method, which steps if the host decides.
        is_own = type(self)._maybe_opt_step is DeviceScaler._maybe_opt_step
        takes_flag = takes_scale or (is_own and may_skip_on_device(optimizer, args, kwargs))
        return self._step(optimizer, takes_scale, takes_flag, args, kwargs)

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
        check_is_optimizer(optimizer)
        params = [param for group in groups_of(optimizer) for param in group["params"]]
        if not self._enabled:
            return clip_grad_norm_(params, max_norm)
        state = self._current_state(optimizer)
        if state["stage"] is OptState.UNSCALED:
            self._watch.look_for_new_gradients(state)
        else:
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
                new_scale = checked_scale("new_scale", new_scale)
            elif new_scale.numel() == 1:
                new_scale = new_scale.reshape(())
            super().update(new_scale)
            self._has_announced = self._has_scaled = False
            self._inspections.clear()
            self._watch.end_step()
            return
        self._update(scale, growth_tracker)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows.

        Args:
            new_factor: At least 1, or ValueError is raised; with 1 the scale never grows.
        """
        self._growth_factor = torchs_options(self.policy, growth_factor=new_factor)[0]

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off.

        Args:
            new_factor: Above 0 and at most 1, or ValueError is raised; with 1 the scale never backs
                off.
        """
        self._backoff_factor = torchs_options(self.policy, backoff_factor=new_factor)[1]

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of steps in a row without overflow after which the scale grows.

        Args:
            new_interval: At least 1, or ValueError is raised.
        """
        self._growth_interval = torchs_options(self.policy, growth_interval=new_interval)[2]

    def get_scale(self) -> float:
        """Return the scale as a number, for which the host waits; 1 if the scaler is disabled."""
        if self._enabled:
            self._watch.note_known_scale(self._has_scaled_gradients())
        scale: float = super().get_scale()
        return scale

    def scale_tensor(self) -> Tensor:
        """Return the live scale, 0-dim float32, to pass as a `grad_scale`; create it if needed."""
        if self._enabled:
            self._watch.note_known_scale(self._has_scaled_gradients())
        return self._live_scale()

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
            TypeError: The scheduler is a ReduceLROnPlateau, or no scheduler.

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


@eager_only
def check_is_optimizer(optimizer: Any) -> None:
    """Raise if this is something else, for example the parameters, which torch's clipping takes."""
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer: expected an optimizer, got {type(optimizer).__name__}")
