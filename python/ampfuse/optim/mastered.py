"""`Mastered`: float32 masters, unscaling, clipping and skipping for any optimizer of torch's kind.

The inner optimizer steps float32 tensors with float32 gradients, and knows nothing of 16 bits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ampfuse._copies import copied_with_group
from ampfuse._graphs import is_capturing
from ampfuse.gradients.shards import refuse_common_ranks
from ampfuse.gradients.signals import Signals
from ampfuse.optim import _inner_states, _loading, options
from ampfuse.optim._callers import DCP, is_called_from
from ampfuse.optim._clips import group_clips
from ampfuse.optim._inner import (
    PARAMS,
    adopt_writes,
    check_make,
    check_sizes,
    make_inner,
    must_skip,
    place_master,
    read_inner_columns,
    refuse_options_of_others,
    round_masters,
    unscaled_clips,
    unscaled_gradients,
    with_masters,
)


class Mastered(Optimizer):
    """Trains 16-bit parameters by float32 masters with any optimizer of torch's interface.

    The optimizer that `make` returns steps the masters of 16-bit parameters, and other parameters
    themselves. It gets float32 gradients, unscaled and clipped. The parameters are then the masters
    rounded to the nearest. What other code has written to a parameter before a step, its master
    adopts. Each `.grad` stays as it was. `param_groups` have the options of the inner optimizer's
    groups: schedulers and programs change them here. Parameters that require no gradient when the
    optimizer is made have no masters, and 16-bit ones must not get gradients later.

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
        ValueError: `max_grad_norm` is below 0 or an option of a group, or the process group has
            ranks with other shards of the same parameters.

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
        check_make(make)
        options.check_limit(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self.process_group = process_group
        self.inner = None
        self._grad_norm: Tensor | None = None
        self._has_stepped = False
        # Until the masters are used, the model may be loaded. Later the inner optimizer may have
        # written them, so that only a step may take a difference for a write to the model.
        self._model_leads = True
        self._agreed: list[dict[str, Any]] = []  # options of each group, when they were the same
        Optimizer.__init__(self, params, {})
        groups = [with_masters(group) for group in self.param_groups]
        self.inner = make_inner(make, groups)
        for group in self.param_groups:
            refuse_options_of_others(group, self.inner.defaults)
        self.defaults = self.inner.defaults
        self._agreed = [{**group} for group in self.param_groups]
        self._exchange_options()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, here and to the inner optimizer.

        Args:
            param_group: A dict with `params`, and any options of a group.

        Raises:
            TypeError: A parameter is no tensor.
            ValueError: A parameter is in another group, or the group has `max_grad_norm` or
                `master_weights`, or the inner optimizer refuses the group.
        """
        Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        try:
            if self.process_group is not None:
                refuse_common_ranks(group["params"], self.process_group)
            if self.inner is not None:
                refuse_options_of_others(group, self.inner.defaults)
                self.inner.add_param_group(with_masters(group))
        except Exception:
            del self.param_groups[-1]
            raise
        if self.inner is not None:
            self._agreed.append({**group})
            self._exchange_options()

    def _exchange_options(self) -> None:
        """Give the inner groups what was changed in the outer ones, and these all the rest."""
        pairs = self._paired_groups()
        for (group, inner), agreed in zip(pairs, self._agreed, strict=True):
            for name, value in group.items():
                if name not in PARAMS and agreed.get(name) is not value:
                    inner[name] = value
            group.update({name: inner[name] for name in inner if name not in PARAMS})
            agreed.update(group)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter, and what the inner optimizer has in its place."""
        for group, inner in self._paired_groups():
            yield from zip(group["params"], inner["params"], strict=True)

    def _paired_groups(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        check_sizes(self.param_groups, self.inner.param_groups)
        return list(zip(self.param_groups, self.inner.param_groups, strict=True))

    def _with_masters(self) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter that has a master, and the master."""
        return [(param, own) for param, own in self._pairs() if own is not param]

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
            TypeError: The model was cast to another dtype since the optimizer was made, or a 16-bit
                parameter that was frozen then has a gradient.
            ValueError: `max_grad_norm` is below 0 or an option of a group, or parameters were added
                in another way than by `add_param_group`.
            RuntimeError: A gradient is sparse, or a CUDA graph is being captured.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if is_capturing():
            raise RuntimeError("Mastered: expected no CUDA graph, which cannot capture this step")
        options.check_limit(self.max_grad_norm)
        for group in self.param_groups:
            refuse_options_of_others(group, self.inner.defaults)
        columns = [read_inner_columns(group, inner) for group, inner in self._paired_groups()]
        self._adopt_writes()
        signals = Signals().add_attributes(self)
        limits: list[float | None] = [None] * len(columns)
        clips, found_inf = group_clips(self, self.param_groups, columns, limits, signals)
        if self.max_grad_norm is not None:
            clips, self._grad_norm = unscaled_clips(columns, clips, signals.grad_scale)
        inverse = None
        if signals.grad_scale is not None:
            inverse = signals.grad_scale.double().reciprocal().float()
        if not must_skip(found_inf, inverse):
            with unscaled_gradients(columns, clips, inverse):
                self._exchange_options()
                self.inner.step()
                self._exchange_options()
            round_masters(columns)
            self._has_stepped, self._model_leads = True, False
        return loss

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last step's unscaled gradients before clipping, 0-dim, on their device.

        The norm is None before the first step, and without `max_grad_norm`.
        """
        if self.max_grad_norm is None or self._grad_norm is None:
            return None
        return self._grad_norm.clone()

    # --- masters --------------------------------------------------------------------------------

    def _adopt_writes(self) -> None:
        """Make all masters adopt what other code has written to their parameters."""
        for param, own in self._with_masters():
            adopt_writes(own, param)

    def master_params(self) -> Iterator[Tensor]:
        """Iterate over the inner optimizer's parameters, in the order of the parameters.

        Programs may write them, and call `sync_model_from_masters` then.

        Yields:
            A 16-bit parameter's float32 master, or the parameter itself.
        """
        if self._model_leads:
            self._adopt_writes()
            self._model_leads = False
        for _, own in self._pairs():
            yield own

    @torch.no_grad()
    def sync_masters_from_model(self) -> None:
        """Make all masters adopt what other code has written to the parameters.

        Elements that were not written keep the additional bits of their masters. A cast of the
        model counts as a write.
        """
        self._adopt_writes()
        self._model_leads = False

    @torch.no_grad()
    def sync_model_from_masters(self) -> None:
        """Set all 16-bit parameters to their masters, rounded.

        Call this after other code than `step` has written masters, for example after
        `optimizer.inner.eval()` of a schedule-free optimizer, and after `optimizer.inner.train()`.
        Otherwise the masters adopt the parameters again at the next step.
        """
        if self._model_leads:
            self._adopt_writes()
        for param, own in self._with_masters():
            param.copy_(own)

    # --- saving and loading ---------------------------------------------------------------------

    @property
    def state(self) -> defaultdict[Any, Any]:
        """The inner optimizer's state by parameter, with the masters, in new dicts.

        This is a view: what is written to the dicts is lost. Write to `optimizer.inner.state`, or
        call `load_state_dict`.
        """
        if self.inner is None:
            return defaultdict(dict)
        is_initial = not self._has_stepped and not self.inner.state
        if is_initial and is_called_from(DCP):  # which takes a step to create the state
            return defaultdict(dict)
        if self._model_leads:
            self._adopt_writes()
        return _inner_states.with_masters(self.inner.state, self._with_masters())

    @state.setter
    def state(self, state: dict[Any, Any]) -> None:
        if self.inner is not None:  # torch's constructor assigns an empty dict before
            raise AttributeError("state: expected load_state_dict() in place of an assignment")

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict, with each master as `master_param`.

        Masters include what other code has written to their parameters, for which the host waits.
        Groups lack the options that choose one of torch's implementations, such as `foreach`.

        Returns:
            A dict with `state` and `param_groups`, as torch's, and an entry that says that the
            masters are current. Tensors are not copied.
        """
        self._exchange_options()
        handle = self.register_state_dict_post_hook(_inner_states.export, prepend=True)
        try:
            return Optimizer.state_dict(self)
        finally:
            handle.remove()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, of the inner optimizer's, or of a fused one of the kind.

        Masters set their parameters, too. Without masters, the next step makes them from the
        parameters. Masters that an optimizer without masters has loaded, and saved again, are
        dropped. If an error is raised, nothing was loaded.

        Args:
            state_dict: The result of `state_dict()`.

        Raises:
            TypeError: The state is no dict, or a master is no tensor.
            ValueError: The groups have other sizes, or `max_grad_norm` or `master_weights`, or a
                master does not fit its parameter.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved = _inner_states.adopt(self.inner, state_dict)
        masters = _loading.checked_masters(self.param_groups, saved)
        self.inner.load_state_dict(_inner_states.without_masters(saved))
        is_dcp = is_called_from(DCP)  # it loads the parameters by itself
        for param, own in self._pairs():
            if own is not param:
                place_master(own, param)
                own.copy_(masters.get(param, param))
            if param in masters and not is_dcp:
                param.copy_(masters[param])
        self._model_leads = not masters and not self.inner.state
        self._agreed = [{**group} for group in self.param_groups]
        self._exchange_options()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy."""
        names = ("defaults", "param_groups", "inner", "max_grad_norm", "process_group")
        own = ("_model_leads", "_has_stepped", "_grad_norm", "_agreed")
        return {name: getattr(self, name) for name in (*names, *own)}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Mastered":
        """Copy the optimizer; the copy has the same process group."""
        return copied_with_group(self, memo)

    def __repr__(self) -> str:
        """Return the inner optimizer's text."""
        return f"Mastered: {self.inner!r}"
