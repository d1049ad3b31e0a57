"""Converts parameter groups to the lists that the op takes, at little cost per step.

Each step needs every gradient, and the state of every parameter that has one. Which parameters
these are, and their dtypes, seldom changes. So this is cached together with their state dicts, and
read again only after a change. The tensors themselves are read at every step, since some
programs move optimizer state to the host and back.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from ampfuse import _C
from ampfuse._graphs import traced_as
from ampfuse.gradients.devices import move_to
from ampfuse.gradients.lists import GradientList, resolve_conjugate_grad
from ampfuse.gradients.shards import is_dtensor, local, place_gradient, sharding_of
from ampfuse.optim._first_indices import first_indices
from ampfuse.optim._rule import Rule
from ampfuse.optim._state import Spares, ensure_in
from ampfuse.optim.options import check_params, option


@dataclass
class Columns(GradientList):
    """The lists of one call of the op: tensors on one device, all with masters or all without."""

    options: dict[str, Any] = field(default_factory=dict)  # numbers and flags that the op takes
    moments: list[list[Tensor]] = field(default_factory=list)  # empty for those of other groups
    state_steps: list[Tensor] = field(default_factory=list)
    masters: list[Tensor] = field(default_factory=list)
    units: Sequence[Tensor] = ()  # of moments in 8 bits: first those of all first moments
    averages: Sequence[Tensor] = ()
    first_indices: Sequence[int] = ()  # if steps round at random
    dtensors: list[Tensor] = field(default_factory=list)  # those of which `params` has shards
    copied: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (original, copy used here)

    def write_back(self) -> None:
        """Copy to the originals what the op wrote to their copies."""
        for tensor, copy in self.copied:
            tensor.copy_(copy)

    def extended(self) -> dict[str, Any]:
        """Return the lists of the op that most steps do not need."""
        if not (self.units or self.averages or self.first_indices):
            return {}
        lists: dict[str, Sequence[Any]] = {
            "units": self.units,
            "ema_params": self.averages,
            "first_indices": self.first_indices,
        }
        return {name: tensors for name, tensors in lists.items() if tensors}

    def lr(self, lr: float | Tensor) -> Tensor:
        """Return a learning rate as the op takes it. A rate on the host stays there."""
        if not isinstance(lr, Tensor):
            return rate(lr)
        if lr.device.type != "cpu":
            lr = move_to(lr, self.device)
        return lr if lr.dtype in (torch.float32, torch.float64) else lr.double()


def _traced_rate(lr: float) -> Tensor:
    # torch.compile would recompile for each value of a constant, but not of a factor.
    return torch.ones((), dtype=torch.float64, device="cpu") * lr


@traced_as(_traced_rate)
def rate(lr: float) -> Tensor:
    """Return a learning rate as a tensor."""
    return torch.scalar_tensor(float(lr), dtype=torch.float64, device="cpu")


def op_options(rule: Rule, group: dict[str, Any], own_options: dict[str, Any]) -> dict[str, Any]:
    """Return a group's options that the op takes as numbers and flags."""
    write_back_grads = option(group, "write_back_grads", own_options)
    options = {**rule.op_options(group), "write_back_grads": write_back_grads}
    of_state = rule.state_options(group, own_options)
    if of_state.has_ema:
        options["ema_decay"] = float(option(group, "ema", own_options))
    if of_state.draws_randoms:
        options["round_at_random"] = of_state.master_weights == "stochastic"
        options["seed"] = option(group, "seed", own_options)
    return options


class GroupColumns:
    """The columns of a parameter group, kept from step to step."""

    def __init__(
        self,
        rule: Rule,
        group: dict[str, Any],
        state: dict[Tensor, dict[str, Any]],
        spares: Spares,
        own_options: dict[str, Any],
        first_indices: list[int],
    ) -> None:
        self._rule, self._own_options = rule, own_options
        self._params: list[Tensor] = list(group["params"])
        self._is_plain = all(map(is_plain, self._params))
        self._members: dict[tuple[torch.device, bool], list[int]] = {}
        self._states: dict[tuple[torch.device, bool], list[dict[str, Any]]] = {}
        self._state_options = rule.state_options(group, own_options)
        self._op_options = op_options(rule, group, own_options)
        self._moments = self._state_options.moments
        self._units = self._state_options.unit_entries
        self._absent: list[list[Tensor]] = [[] for _ in rule.moments[len(self._moments) :]]
        self._first_indices = first_indices
        grads, self._kinds = self._grads_and_kinds()
        for index, param in enumerate(self._params):
            if grads[index] is None:
                continue
            refuse_sparse(param, rule)
            of_param = ensure_in(state, param, self._state_options, spares)
            kind = (param.device, "master_param" in of_param)
            self._members.setdefault(kind, []).append(index)
            self._states.setdefault(kind, []).append(of_param)
        self._counts_steps = self._state_options.counts_steps
        self._steps = self._read_steps()

    def read(self, group: dict[str, Any]) -> list[Columns] | None:
        """Return the columns as they are now, or None if this object is out of date."""
        params = group["params"]
        if len(params) != len(self._params) or not all(map(is_, params, self._params)):
            return None
        grads, kinds = self._grads_and_kinds()
        if kinds != self._kinds:
            return None
        try:
            if not all(map(is_, self._steps, self._read_steps())):
                return None  # other code has replaced some, maybe in another dtype
            return [
                self._read(has_masters, members, self._states[device, has_masters], grads)
                for (device, has_masters), members in self._members.items()
            ]
        except KeyError:  # other code has removed an entry of a state dict
            return None

    def adopt_options(self, group: dict[str, Any]) -> bool:
        """Read the group's options again. Return False if they demand other state than before."""
        self._op_options = op_options(self._rule, group, self._own_options)
        return self._rule.state_options(group, self._own_options) == self._state_options

    def _read_steps(self) -> list[Any]:
        if not self._counts_steps:
            return []
        return [state["step"] for state in chain.from_iterable(self._states.values())]

    def _grads_and_kinds(self) -> tuple[list[Any], Any]:
        """Return all gradients, and a key: all dtypes and which parameters have a gradient.

        The key has dtypes because a model that is cast keeps the same parameter objects.
        """
        if self._is_plain:
            return _C.grads_and_kinds(self._params)
        for param in self._params:
            resolve_conjugate_grad(param)
        grads = [param.grad for param in self._params]
        return grads, [(p.dtype, g is None) for p, g in zip(self._params, grads, strict=True)]

    def _read(
        self,
        has_masters: bool,
        members: list[int],
        states: list[dict[str, Any]],
        all_grads: list[Any],
    ) -> Columns:
        everything = len(members) == len(self._params)
        params = self._params if everything else [self._params[i] for i in members]
        columns = Columns(
            device=params[0].device,
            params=params,
            grads=all_grads if everything else [all_grads[i] for i in members],
            options=self._op_options,
            moments=[[state[name] for state in states] for name in self._moments] + self._absent,
        )
        if self._counts_steps:
            columns.state_steps = [state["step"] for state in states]
        if has_masters:
            columns.masters = [state["master_param"] for state in states]
        if self._units:
            columns.units = [state[name] for name in self._units for state in states]
        if self._state_options.has_ema:
            columns.averages = [state["ema_param"] for state in states]
        if self._first_indices:
            columns.first_indices = [self._first_indices[index] for index in members]
        if self._is_plain:
            return columns
        return localized(columns)


class ColumnCache:
    """The cached columns of all groups."""

    def __init__(self, rule: Rule, own_options: dict[str, Any]) -> None:
        self._rule, self._own_options = rule, own_options
        self._groups: list[GroupColumns] = []
        self._states: list[dict[str, Any]] = []
        self._checked: list[Any] | None = None  # grad_kinds() that the op has accepted
        self._before_step: set[Tensor] | None = None  # params that had state before this step
        self._options: list[Any] = []  # the values of all options that were checked

    def have_options_changed(self, groups: list[dict[str, Any]], limit: float | None) -> bool:
        """Return True if an option is another object than when `note_options` was called."""
        now = values_of(groups, limit)
        return len(now) != len(self._options) or not all(map(is_, now, self._options))

    def note_options(self, groups: list[dict[str, Any]], limit: float | None) -> None:
        """Record options that were checked."""
        self._options = values_of(groups, limit)
        if len(self._groups) == len(groups):
            pairs = zip(self._groups, groups, strict=True)
            if not all([known.adopt_options(group) for known, group in pairs]):
                self._groups = []

    def read(
        self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]], spares: Spares
    ) -> list[list[Columns]]:
        """Return the columns of each group; create missing state."""
        columns = self._read_known(groups, state)
        if columns is None:
            self._checked = None
            self._before_step = set(state)
            for index, group in enumerate(groups):  # the model may have been cast
                check_params(self._rule, group, index, self._own_options)
            self._groups = [
                GroupColumns(self._rule, group, state, spares, self._own_options, first)
                for group, first in zip(
                    groups, first_indices(self._rule, groups, self._own_options), strict=True
                )
            ]
            self._states = list(state.values())
            columns = self._read_known(groups, state)
            assert columns is not None
        return columns

    def _read_known(
        self, groups: list[dict[str, Any]], state: dict[Tensor, dict[str, Any]]
    ) -> list[list[Columns]] | None:
        if len(self._groups) != len(groups) or len(self._states) != len(state):
            return None
        if not all(map(is_, self._states, state.values())):
            return None
        columns = []
        for known, group in zip(self._groups, groups, strict=True):
            of_group = known.read(group)
            if of_group is None:
                return None
            columns.append(of_group)
        return columns

    def may_be_refused(self, columns: list[list[Columns]]) -> bool:
        """Return True if the op may raise in one of several calls, after others have stepped."""
        return sum(map(len, columns)) > 1 and self._checked != grad_kinds(columns)

    def note_check(self, columns: list[list[Columns]]) -> None:
        """Record that the op accepts these columns. Only their gradients change between steps."""
        self._checked = grad_kinds(columns)

    def note_step(self) -> None:
        """Keep the state that a step has created. Call this after the step."""
        self._before_step = None

    def forget_step(self, state: dict[Tensor, dict[str, Any]]) -> None:
        """Delete the state that a step has created. Call this if the step raised."""
        if self._before_step is not None:
            for param in [param for param in state if param not in self._before_step]:
                del state[param]
        self._before_step = None


def values_of(groups: list[dict[str, Any]], limit: float | None) -> list[Any]:
    """Return names and values of all options of all groups, and the limit over all groups."""
    found: list[Any] = [limit]
    for group in groups:
        found += group
        found += group.values()
        betas = group.get("betas", ())
        if not isinstance(betas, tuple):  # a list, for example, may be changed in place
            found += betas
    return found


def grad_kinds(columns: list[list[Columns]]) -> list[Any]:
    """Return the properties of the gradients for which the op may raise."""
    kind = attrgetter("dtype", "layout")
    return [list(map(kind, one.grads)) for one in chain.from_iterable(columns)]


def is_plain(param: Tensor) -> bool:
    """Return True if kernels can take the tensor as it is."""
    return type(param) in (Tensor, torch.nn.Parameter) and not param.is_complex()


def refuse_sparse(param: Tensor, rule: Rule) -> None:
    """Raise if the gradient is sparse."""
    if param.grad is not None and param.grad.is_sparse:
        raise RuntimeError(f"{rule.sparse_error} {tuple(param.shape)}")


def localized(columns: Columns) -> Columns:
    """Replace DTensors by this rank's shards, and complex tensors by pairs of real numbers."""
    columns.grads = list(map(place_gradient, columns.params, columns.grads))
    columns.shardings = [sharding_of(grad) for grad in columns.grads]
    columns.dtensors = list(filter(is_dtensor, columns.params))
    for name in ("params", "grads", "masters", "averages"):
        copied = columns.copied if name != "grads" or columns.options["write_back_grads"] else []
        setattr(columns, name, [_real(tensor, copied) for tensor in getattr(columns, name)])
    columns.moments = [[_real(one, columns.copied) for one in each] for each in columns.moments]
    columns.state_steps = [local(step) for step in columns.state_steps]
    return columns


def _real(tensor: Tensor, copied: list[tuple[Tensor, Tensor]]) -> Tensor:
    tensor = local(tensor)
    if not tensor.is_complex():
        return tensor
    return _written_view(torch.view_as_real(tensor.resolve_conj()), copied)


def _traced_view(real: Tensor, copied: list[tuple[Tensor, Tensor]]) -> Tensor:
    # In a compiled graph the op cannot write to a view whose dtype is not that of its base tensor.
    copied.append((real, real.clone()))
    return copied[-1][1]


@traced_as(_traced_view)
def _written_view(real: Tensor, copied: list[tuple[Tensor, Tensor]]) -> Tensor:
    return real


def describe_parameter(
    error: Exception, columns: Columns, groups: list[dict[str, Any]]
) -> Exception:
    """Return the op's error about an entry of its lists, with a description of the parameter."""
    found = re.match(r"fused_\w+: \w+\[(\d+)\]", str(error))
    param = columns.params[int(found[1])] if found else None
    for group_index, group in enumerate(groups):
        for index, candidate in enumerate(group["params"]):
            if candidate is param:
                what = f"parameter {index} of group {group_index}, {param.dtype} of shape "
                return type(error)(f"{error} ({what}{tuple(param.shape)})")
    return error
