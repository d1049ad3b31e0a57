"""The base of optimizers that step in one pass over memory, with fp32 masters if needed.

Unscaling, clipping and the decision to skip are part of that pass: gradients are read, not written
unless requested, and the host never waits for a GPU.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ampfuse._copies import copied_with_group
from ampfuse._graphs import groups_of, traced_as
from ampfuse.gradients.shards import local, refuse_common_ranks
from ampfuse.gradients.signals import Slot
from ampfuse.optim import _loading, _saving, options, stepping
from ampfuse.optim._averaged import averages_as_params, refuse_averaged
from ampfuse.optim._callers import DCP, ZERO, is_called_from
from ampfuse.optim._columns import ColumnCache, refuse_sparse
from ampfuse.optim._remainders import exported
from ampfuse.optim._rule import Rule
from ampfuse.optim._snapshot import Snapshot
from ampfuse.optim._state import Spares, adopt_param
from ampfuse.optim._step import take_step
from ampfuse.optim._traced import Traced
from ampfuse.optim._written import WrittenParams

OWN_ATTRIBUTES = {"max_grad_norm", "process_group", "_is_in_zero", "_own_options", "_unscale"}


class FusedOptimizer(Optimizer):
    """The base of ampfuse's optimizers. A derived class has a `Rule`, and torch's class as a base.

    Args:
        defaults: The options that torch's class has, too.
        own_options: The constructor's `master_weights`, `write_back_grads` and dtype of moments.
    """

    # torch's class is a base for isinstance only: its methods are not used. Methods of torch's
    # Optimizer are called as `Optimizer.name(self)`.

    _rule: Rule
    _own_options: dict[str, Any]
    _unscale = "auto"
    _loading: dict[str, Any] | None = None  # a state dictionary, while it is loaded
    _grad_norm: Tensor | None = None
    _is_in_zero = False  # True if other ranks step other parameters
    _is_in_graphs = False  # True if graphs write the state in place
    _unscales_in_place = False  # True if a scaler's step writes gradients back
    _has_own_options = True  # False in replacements of torch's classes
    max_grad_norm: float | None = None
    process_group: Any = None
    found_inf: Tensor | None  # while torch's scaler steps

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        own_options: dict[str, Any],
        *,
        max_grad_norm: float | None,
        unscale: str,
        process_group: Any,
    ) -> None:
        rule = self._rule
        own_options = {
            **own_options,
            rule.moment_dtype: options.dtype_name(own_options[rule.moment_dtype]),
            "ema_dtype": options.dtype_name(own_options["ema_dtype"]),
            "max_grad_norm": None,  # for groups only: the argument is a limit over all groups
        }
        checked = options.plain(rule, {**defaults, **own_options})
        options.check_initial(rule, checked)
        options.check_limit(max_grad_norm)
        options.check_unscale(unscale, process_group)
        self._unscale = unscale
        self.max_grad_norm = max_grad_norm
        self.process_group = process_group
        self._own_options = {name: checked[name] for name in own_options}
        self._columns = ColumnCache(rule, self._own_options)
        self._written = WrittenParams()
        self._note_zero()
        self._spare_masters: Spares = {}
        Optimizer.__init__(self, params, {name: checked[name] for name in defaults})
        self._traced, self._slot = Traced(self), Slot()
        options.warn_of_float32_weights(own_options["master_weights"], self.param_groups)

    def _note_zero(self) -> None:
        self._is_in_zero = is_called_from(ZERO) and torch.distributed.get_world_size() > 1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters as torch does; its options are checked like the constructor's.

        Args:
            param_group: A dict with `params`, and any options of a group.

        Raises:
            TypeError: An option has a wrong type.
            ValueError: An option is out of range, or a parameter is in another group.
        """
        Optimizer.add_param_group(self, param_group)
        group = self.param_groups[-1]
        if self._has_own_options:
            if options.has_torchs(group):  # perhaps from torch's optimizer
                group = self.param_groups[-1] = options.drop_torchs_options(group)
            for dtype in (self._rule.moment_dtype, "ema_dtype"):
                if dtype in group:
                    group[dtype] = options.dtype_name(group[dtype])
            options.plain(self._rule, group)
        try:
            options.refuse_other_dtype(self._rule, group)
            options.check_initial(self._rule, group)
            index = len(self.param_groups) - 1
            options.check_params(self._rule, group, index, self._own_options)
            if self.process_group is not None:
                refuse_common_ranks(group["params"], self.process_group)
        except Exception:
            del self.param_groups[-1]
            raise
        self._rule.warn(group, self._own_options)
        self._columns = ColumnCache(self._rule, self._own_options)

    def __repr__(self) -> str:
        """Return torch's text, with the constructor's own options in each group."""
        lines = [f"{type(self).__name__} ("]
        for index, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {index}")
            shown = self.options_of(group) if self._has_own_options else group
            lines += [f"    {name}: {shown[name]}" for name in sorted(shown.keys() - {"params"})]
        return "\n".join([*lines, ")"])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy."""
        refuse_averaged(self, "copy")
        own = {name: vars(self)[name] for name in OWN_ATTRIBUTES & vars(self).keys()}
        return {**Optimizer.__getstate__(self), **own}

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedOptimizer":
        """Copy the optimizer; the copy has the same process group."""
        return copied_with_group(self, memo)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state for pickle, deepcopy and load_state_dict."""
        loading = self._loading
        if loading is not None:
            options.fill(self._rule, self.param_groups, self.defaults)
            old, new = self.param_groups, state["param_groups"]
            _loading.keep_options(self._rule, new, old)
            for index, group in enumerate(new):
                options.check_params(self._rule, group, index, self._own_options)
            states = _loading.new_states(self._rule, old, loading, self._own_options)
            _loading.keep_rates(new, old)
            state = {**state, "state": self.state}
        Optimizer.__setstate__(self, state)
        if self._has_own_options:
            self.defaults.pop("differentiable", None)  # set by torch's __setstate__
        self._own_options = {**self._rule.ours, **self._own_options}  # of an earlier version
        self._columns = ColumnCache(self._rule, self._own_options)
        self._written = vars(self).get("_written") or WrittenParams()
        self._written.forget()
        self._traced = vars(self).get("_traced") or Traced(self)
        self._slot = vars(self).get("_slot") or Slot()
        self._traced.param_groups = self.param_groups
        self._spare_masters = {}
        if loading is not None:
            if is_called_from(DCP):  # masters may have stayed, if its checkpoint had none
                self._written.compare()
            others = _loading.unowned_states(self.param_groups, loading)
            self._spare_masters = _loading.put_states(
                self.state, states, others, in_place=self._is_in_graphs
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient, and their state, in place.

        The host does not wait. The step is skipped on the device if a scaler has found a non-finite
        gradient. Gradients are only read, unless `write_back_grads` is set.

        Args:
            closure: A function that is called first, with gradients enabled; it computes the loss
                and the gradients, and returns the loss.

        Returns:
            The result of `closure`, or None.

        Raises:
            TypeError: A gradient or a state tensor has a dtype that does not fit its parameter.
            ValueError: An option is out of range, or a gradient has another shape or device.
            RuntimeError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        except (RuntimeError, ValueError, TypeError):
            self._columns.forget_step(self.state)
            for group in self.param_groups:
                for param in group["params"]:
                    refuse_sparse(param, self._rule)  # clearer than the ops' errors
            raise
        return loss

    _own_step = inspect.unwrap(step)  # derived classes may override step

    def _traced_zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            Optimizer.zero_grad(self, set_to_none)
            return
        for group in groups_of(self):
            for param in group["params"]:
                param.grad = None  # not read, so the graph does not depend on it

    @traced_as(_traced_zero_grad)
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients as torch does, but so that torch.compile can trace it.

        Args:
            set_to_none: Set gradients to None; False sets their elements to 0.
        """
        Optimizer.zero_grad(self, set_to_none)

    def _step(self) -> None:
        take_step(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return True if a scaler leaves unscaling and skipping to the step. The name is torch's.

        Scalers and frameworks read it. Programs set it, to have the gradients unscaled before.
        """
        is_auto = self._unscale == "auto" and self.process_group is None
        return self._unscale != "before" and not (
            is_auto and stepping.is_wrapped_by_accelerate(self)
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self._unscale = "in_step" if value else "before"

    def _may_skip_itself(self) -> bool:
        """Return True if the device may decide to skip a step, which creates state even then."""
        return True

    @property
    def grad_norm(self) -> Tensor | None:
        """Norm of the last step's unscaled gradients before clipping, 0-dim, on their device.

        Groups that have a limit of their own are left out. The norm is None before the first step,
        and if the constructor got no `max_grad_norm`.
        """
        if self.max_grad_norm is None or self._grad_norm is None:
            return None
        return self._grad_norm.clone()

    @grad_norm.setter
    def grad_norm(self, norm: Tensor | None) -> None:
        if self._grad_norm is not None:
            self._grad_norm.copy_(torch.zeros(()) if norm is None else norm)

    def master_params(self) -> Iterator[Tensor]:
        """Iterate over the tensors that hold the full precision, in the order of the parameters.

        If other code has written parameters since the last step, call `sync_masters_from_model`
        first.

        Yields:
            A parameter's float32 master, a new float32 tensor if the parameter has a remainder, or
            else the parameter itself.

        Raises:
            RuntimeError: The parameters are averages, see `averaged`.
        """
        refuse_averaged(self, "master_params")
        for group in self.param_groups:
            for param in group["params"]:
                state = exported(param, self.state.get(param, {}))
                yield state.get("master_param", param)

    @torch.no_grad()
    def sync_masters_from_model(self) -> None:
        """Make all masters adopt what other code has written to the parameters.

        Elements that were not written keep the additional bits of their masters. A cast of the
        model counts as a write. A remainder stays as it is: the parameter is the other half of its
        master.
        """
        refuse_averaged(self, "sync_masters_from_model")
        for group in self.param_groups:
            for param in group["params"]:
                master = self.state.get(param, {}).get("master_param")
                if master is not None and master.dtype == torch.float32:
                    adopt_param(local(param.detach()).to(master.device), local(master))
        self._written.forget()

    def averaged(self, model: torch.nn.Module | None = None) -> AbstractContextManager[None]:
        """Make the parameters their exponential averages for a block, for example to evaluate.

        Parameters without an average yet, or whose group has none, keep their values. Buffers, such
        as the statistics of batch norms, are not averaged. During the block there is a copy of the
        parameters. What is written to the parameters in it is lost at its end. Do not step, save or
        load the optimizer in it.

        Args:
            model: The model, if it is sharded by `fully_shard`: it then gathers the averages. Other
                models need not be passed.

        Returns:
            A context manager.

        Raises:
            RuntimeError: No group has the option `ema`, this is called in such a block, or
                parameters are DTensors and `model` is missing.

        Examples:
            >>> import torch, ampfuse
            >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
            >>> optimizer = ampfuse.SGD([weight], lr=1.0, ema=0.5)
            >>> for _ in range(2):
            ...     weight.grad = torch.tensor([1.0])
            ...     optimizer.step()
            >>> with optimizer.averaged():
            ...     print(weight.item())
            -0.5
            >>> weight.item()
            -1.0
        """
        return averages_as_params(self, model)

    def options_of(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return all options of a group, with those of the constructor that it does not have.

        Args:
            group: One of `param_groups`.

        Returns:
            The options by name, without `params`.
        """
        own = {**self._own_options, **group}
        return {name: value for name, value in own.items() if name != "params"}

    def check_process_group(self, process_group: Any) -> None:
        """Raise if the optimizer cannot step together with these ranks.

        Args:
            process_group: What would be its `process_group`.

        Raises:
            ValueError: The scaler would unscale before each step.
        """
        options.check_unscale(self._unscale, process_group)

    def snapshot(self) -> Snapshot:
        """Return references to the state of parameters with gradients, which a graph writes.

        The values are not copied: `restore` does not undo steps.
        """
        return Snapshot(self)

    @torch.no_grad()
    def restore(self, snapshot: Snapshot) -> None:
        """Copy the state to the tensors of a snapshot, if others have replaced them since.

        Args:
            snapshot: The result of `snapshot()` after the capture.
        """
        refuse_averaged(self, "step")
        snapshot.put_back(self)

    def state_dict(self, *, decoded: bool = False) -> dict[str, Any]:
        """Return torch's state dict. Remainders are saved as the float32 masters they represent.

        Moments in 8 bits are saved as codes and units, except those of DTensors and those that
        torch's distributed checkpoints ask for: shards may cut groups of 32 elements, so these are
        saved as float32.

        Args:
            decoded: Save all 8-bit moments as float32, which torch's class can load.

        Returns:
            A dict with `state` and `param_groups`, as torch's. Tensors are not copied, except
            remainders, decoded moments and learning rates.
        """
        refuse_averaged(self, "state_dict")
        return _saving.saved_state_dict(self, decoded)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or torch's.

        State that a captured or compiled step writes is copied into its tensors; otherwise the
        tensors are replaced. `master_weights` and the dtype of moments are not loaded: saved state
        is converted to the present ones. After a checkpoint without masters, for example torch's,
        the next step makes them from the parameters; a checkpoint with masters sets the parameters
        too, except 16-bit ones that have no masters now. Options that the checkpoint lacks stay
        unchanged.

        Args:
            state_dict: The result of `state_dict()` of the same optimizer, ampfuse's or torch's.

        Raises:
            KeyError: A group or a state lacks an entry of this optimizer.
            TypeError: An entry has a wrong type.
            ValueError: An entry is out of range, or does not fit its parameter.
        """
        refuse_averaged(self, "load_state_dict")
        _loading.load_into(self, state_dict)
