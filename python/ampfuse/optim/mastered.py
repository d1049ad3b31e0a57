"""`Mastered`: float32 masters, unscaling, clipping and skipping for any optimizer of torch's kind.

The inner optimizer steps float32 tensors with float32 gradients, and knows nothing of 16 bits.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ampfuse._graphs import is_capturing
from ampfuse.gradients.devices import move_to
from ampfuse.gradients.norms import rounded
from ampfuse.gradients.shards import refuse_common_ranks
from ampfuse.gradients.signals import Signals
from ampfuse.optim import _loading, options
from ampfuse.optim._clips import Clip, group_clips
from ampfuse.optim._columns import Columns
from ampfuse.optim._inner import (
    PARAMS,
    check_inner,
    must_skip,
    read_inner_columns,
    renew_master,
    round_masters,
    unscaled_gradients,
    with_masters,
)
from ampfuse.optim._state import include_writes
from ampfuse.optim._written import WrittenParams


class Mastered(Optimizer):
    """Trains 16-bit parameters by float32 masters with any optimizer of torch's interface.

    The optimizer that `make` returns steps the masters of 16-bit parameters, and other parameters
    themselves. It gets float32 gradients, unscaled and clipped. The parameters are then the masters
    rounded to the nearest. Each `.grad` stays as it was. `param_groups` have the options of the
    inner optimizer's groups: schedulers and programs change them here.

    With a scaler, the host waits once per step to know whether it is skipped: the inner optimizer
    is not called then. Without a scaler the host does not wait. torch.compile breaks its graph at
    the step, which no CUDA graph can capture. Masters, and gradients during a step, take 4 bytes
    per 16-bit parameter each.

    Args:
        make: A function that gets parameter groups, and returns the optimizer to use.
        params: Parameters, or dicts of parameters with options for `make`.
        max_grad_norm: Clip the norm of all gradients to this number, or None.
        process_group: Ranks that step other parameters, whose gradients count in the norm, and
            which skip a step together, or None.

    Raises:
        TypeError: `make` does not return an optimizer of the parameters that it got, or its step
            needs a closure, as that of LBFGS does.
        ValueError: `max_grad_norm` is below 0, or the process group has ranks with other shards of
            the same parameters.

    Examples:
        >>> import torch, ampfuse
        >>> model = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
        >>> optimizer = ampfuse.Mastered(lambda p: torch.optim.Muon(p, lr=0.02), model.parameters())
        >>> model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> [master.dtype for master in optimizer.master_params()]
        [torch.float32]
    """

    inner: Any
    """The optimizer that `make` has returned."""

    def __init__(
        self,
        make: Callable[[Any], Optimizer],
        params: ParamsT,
        *,
        max_grad_norm: float | None = None,
        process_group: Any = None,
    ) -> None:
        options.check_limit(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.process_group = process_group
        self.inner = None
        self._grad_norm: Tensor | None = None
        self._written = WrittenParams()
        self._must_renew = True  # masters, at the next step: the model may be loaded or moved
        self._agreed: list[dict[str, Any]] = []  # options of each group, when they were the same
        Optimizer.__init__(self, params, {})
        groups = [with_masters(group) for group in self.param_groups]
        self.inner = make([dict(group) for group in groups])
        check_inner(self.inner, groups)
        self.defaults = self.inner.defaults
        self._agreed = [{**group} for group in self.param_groups]
        self._exchange_options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, here and to the inner optimizer.

        Args:
            param_group: A dict with `params`, and any options of a group.

        Raises:
            TypeError: A parameter is no tensor.
            ValueError: A parameter is in another group, or the inner optimizer refuses the group.
        """
        Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        try:
            if self.process_group is not None:
                refuse_common_ranks(group["params"], self.process_group)
            if self.inner is not None:
                self.inner.add_param_group(with_masters(group))
        except Exception:
            del self.param_groups[-1]
            raise
        if self.inner is not None:
            self._agreed.append({**group})
            self._exchange_options()

    def _exchange_options(self) -> None:
        """Give the inner groups what was changed in the outer ones, and these all the rest."""
        for group, inner, agreed in zip(
            self.param_groups, self.inner.param_groups, self._agreed, strict=True
        ):
            for name, value in group.items():
                if name not in PARAMS and agreed.get(name) is not value:
                    inner[name] = value
            group.update({name: inner[name] for name in inner if name not in PARAMS})
            agreed.update(group)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter, and what the inner optimizer has in its place."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            yield from zip(group["params"], inner["params"], strict=True)

    # --- steps ----------------------------------------------------------------------------------

    _step_supports_amp_scaling = True  # scalers leave unscaling and skipping to the step

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer, unless a scaler has found a gradient that is not finite.

        Args:
            closure: A function that is called first, with gradients enabled; it computes the loss
                and the gradients, and returns the loss.

        Returns:
            The result of `closure`, or None.

        Raises:
            TypeError: The model was cast to another dtype since the optimizer was made.
            RuntimeError: A CUDA graph is being captured.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_capturing():
            raise RuntimeError("Mastered: expected no CUDA graph, which cannot capture this step")
        if self._must_renew:
            self.sync_masters_from_model()
        pairs = zip(self.param_groups, self.inner.param_groups, strict=True)
        columns = [read_inner_columns(group, inner) for group, inner in pairs]
        self._written.adopt(columns)
        signals = Signals().add_attributes(self)
        limits: list[float | None] = [None] * len(columns)
        clips, found_inf = group_clips(self, self.param_groups, columns, limits, signals)
        clips = self._unscale_norm(columns, clips, signals.grad_scale)
        inverse = None
        if signals.grad_scale is not None:
            inverse = signals.grad_scale.double().reciprocal().float()
        if not must_skip(found_inf, inverse):
            with unscaled_gradients(columns, clips, inverse):
                self._exchange_options()
                self.inner.step()
                self._exchange_options()
            round_masters(columns)
        self._written.note_step(columns)
        return loss

    def _unscale_norm(
        self, columns: list[list[Columns]], clips: list[Clip | None], scale: Tensor | None
    ) -> list[Clip | None]:
        """Return clips with the norm of unscaled gradients, and record this norm."""
        if self.max_grad_norm is None or not clips or clips[0] is None:
            return clips
        norm = clips[0].total_norm
        norm = norm if scale is None else norm / move_to(scale, norm.device)
        grads = [grad for of_group in columns for one in of_group for grad in one.grads]
        self._grad_norm = rounded(norm, grads)
        return [Clip(self._grad_norm, self.max_grad_norm, None)] * len(clips)

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last step's unscaled gradients before clipping, 0-dim, on their device.

        The norm is None before the first step, and without `max_grad_norm`.
        """
        return None if self._grad_norm is None else self._grad_norm.clone()

    # --- masters --------------------------------------------------------------------------------

    def master_params(self) -> Iterator[Tensor]:
        """Iterate over the inner optimizer's parameters, in the order of the parameters.

        Yields:
            A 16-bit parameter's float32 master, or the parameter itself.
        """
        for _, own in self._pairs():
            yield own

    @torch.no_grad()
    def sync_masters_from_model(self) -> None:
        """Set all masters to the parameters. The additional bits of the masters are lost."""
        for param, own in self._pairs():
            if own is not param:
                renew_master(own, param)
        self._must_renew = False
        self._written.forget()

    @torch.no_grad()
    def sync_model_from_masters(self) -> None:
        """Set all 16-bit parameters to their masters, rounded.

        Call this after other code than `step` has written masters, for example after
        `optimizer.inner.eval()` of a schedule-free optimizer, and after `optimizer.inner.train()`.
        """
        for param, own in self._pairs():
            if own is not param:
                param.copy_(own)
        self._written.forget()

    # --- saving and loading ---------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The inner optimizer's state by parameter, with the masters, in new dicts."""
        if self.inner is None:
            return defaultdict(dict)
        masters = {own: param for param, own in self._pairs() if own is not param}
        found: defaultdict[Any, Any] = defaultdict(dict)
        for key, value in self.inner.state.items():
            is_of_master = isinstance(key, Tensor) and key in masters
            found[masters[key] if is_of_master else key] = value
        for own, param in masters.items():
            found[param] = {**found[param], "master_param": own.detach()}
        return found

    @state.setter
    def state(self, state: dict[Any, Any]) -> None:
        if state:
            raise AttributeError("state: expected load_state_dict() in place of an assignment")

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with each master as `master_param`.

        Masters include what other code has written to their parameters, for which the host waits.

        Returns:
            A dict with `state` and `param_groups`, as torch's. Tensors are not copied.
        """
        self._exchange_options()
        handle = self.register_state_dict_post_hook(include_writes_to_params, prepend=True)
        try:
            return Optimizer.state_dict(self)
        finally:
            handle.remove()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of the inner optimizer's.

        Masters set their parameters, too. Without masters, the next step makes them from the
        parameters. If an error is raised, nothing was loaded.

        Args:
            state_dict: The result of `state_dict()`.

        Raises:
            TypeError: A master is no tensor.
            ValueError: The groups have other sizes, or a master does not fit its parameter.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        masters = _loading.checked_masters(self.param_groups, state_dict)
        state = {
            key: {name: copied(value) for name, value in entries.items() if name != "master_param"}
            if isinstance(entries, dict)
            else entries
            for key, entries in state_dict["state"].items()
        }
        state = {key: entries for key, entries in state.items() if entries != {}}
        self.inner.load_state_dict({**state_dict, "state": state})
        for param, own in self._pairs():
            if own is not param:
                renew_master(own, param)
            if param in masters:
                own.copy_(masters[param])
                param.copy_(own)
        self._must_renew = not masters
        self._written.forget()
        self._agreed = [{**group} for group in self.param_groups]
        self._exchange_options()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy."""
        names = ("defaults", "param_groups", "inner", "max_grad_norm", "process_group")
        own = {name: getattr(self, name) for name in (*names, "_must_renew", "_grad_norm")}
        return {**own, "_agreed": self._agreed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state for pickle and deepcopy."""
        Optimizer.__setstate__(self, state)
        self._written = WrittenParams()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mastered":
        """Copy the optimizer; the copy has the same process group."""
        memo[id(self.process_group)] = self.process_group
        copy_of_self = memo[id(self)] = type(self).__new__(type(self))
        copy_of_self.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copy_of_self

    def __repr__(self) -> str:
        """Return the inner optimizer's text."""
        return f"Mastered: {self.inner!r}"


def include_writes_to_params(optimizer: Any, saved: dict[str, Any]) -> None:
    """Let saved masters adopt what other code has written to their parameters. This is a hook."""
    for key, (param, _, _) in _loading.owners(optimizer.param_groups, saved).items():
        entries = saved["state"].get(key, {})
        if "master_param" in entries:
            master = include_writes(param, entries["master_param"])
            saved["state"][key] = {**entries, "master_param": master}


def copied(value: Any) -> Any:
    """Return a copy of a tensor, and other values as they are."""
    return value.clone() if isinstance(value, Tensor) else value
