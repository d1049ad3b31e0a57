"""The view of an optimizer in compiled code, which the compiler can trace and guard.

State is created during tracing, as torch does for its own optimizers, so that the first step needs
no graph of its own. Gradients may come from a backward pass in the same graph. Then they exist for
traced code, but not for other code.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from ampfuse._graphs import at_compile_time, make_static
from ampfuse.optim import stepping
from ampfuse.optim._clips import grad_norm_tensor
from ampfuse.optim._columns import (
    Columns,
    is_plain,
    localized,
    op_options,
    refuse_sparse,
)
from ampfuse.optim._first_indices import first_indices
from ampfuse.optim._state import ensure_in, master_dtype
from ampfuse.optim.options import check_limit, limits_of


class Traced:
    """The object that the compiler sees in place of an optimizer.

    The compiler treats an optimizer specially. Parameters that are read from its `param_groups`
    become constants of the graph, and a backward pass in such a graph silently ignores them.
    Attributes that are set on an optimizer are not traced at all.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups
        self.has_scheduler = False
        self.steps_alone = False
        self.skips_unseen = False
        self.takes_tensors = False
        self.is_averaged = False  # True while averages are in place of the parameters

    @at_compile_time
    def begin(self) -> None:
        """Read the optimizer again, and register its parameters with the compiler.

        Without this, a parameter that is a constant of another graph is one of this graph, too.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        self.param_groups = optimizer.param_groups
        for group in self.param_groups:
            make_static(group["params"], guard=False)
        self.has_scheduler = stepping.has_scheduler(optimizer)
        self.steps_alone = stepping.steps_alone(optimizer)
        self.skips_unseen = stepping.skips_unseen(optimizer)
        self.takes_tensors = optimizer._step_supports_amp_scaling
        optimizer._opt_called = True  # schedulers check it

    @at_compile_time
    def make_state(self, with_gradient: list[list[int]]) -> list[list[int]]:
        """Create the state of these parameters of each group, and the tensor for the norm.

        Returns the index of each parameter's first element, if steps round at random.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        params = [
            [group["params"][index] for index in indices]
            for group, indices in zip(self.param_groups, with_gradient, strict=True)
        ]
        limits = limits_of(self.param_groups, optimizer._own_options)
        optimizer._grad_norm = grad_norm_tensor(optimizer._grad_norm, limits, params)
        optimizer._is_in_graphs = True
        make_static([optimizer._grad_norm])
        for group, of_group in zip(self.param_groups, params, strict=True):
            of_state = optimizer._rule.state_options(group, optimizer._own_options)
            for param in of_group:
                state = ensure_in(optimizer.state, param, of_state, optimizer._spare_masters)
                make_static(state.values())
        return first_indices(optimizer._rule, self.param_groups, optimizer._own_options)


def traced_columns(
    optimizer: Any,
    groups: list[dict[str, Any]],
    limits: list[float | None],  # read again by make_state, outside of the graph
) -> list[list[Columns]]:
    """Return the columns of each group; create missing state."""
    check_limit(optimizer.max_grad_norm)
    with_gradient = [
        [index for index, param in enumerate(group["params"]) if param.grad is not None]
        for group in groups
    ]
    first = optimizer._traced.make_state(with_gradient)
    return [
        _group_columns(optimizer, group, indices, of_group)
        for group, indices, of_group in zip(groups, with_gradient, first, strict=True)
    ]


def _group_columns(
    optimizer: Any, group: dict[str, Any], indices: list[int], first: list[int]
) -> list[Columns]:
    rule = optimizer._rule
    of_state = rule.state_options(group, optimizer._own_options)
    of_op = op_options(rule, group, optimizer._own_options)
    members: dict[tuple[torch.device, bool], list[tuple[Tensor, dict[str, Any], int]]] = {}
    for index in indices:
        param = group["params"][index]
        refuse_sparse(param, rule)
        id(param)  # a guard: the graph holds this parameter's state, so it does not fit others
        has_master = master_dtype(param, of_state) is not None
        has_state = of_state.counts_steps or has_master
        state = optimizer.state[param] if has_state else {}
        kind = (param.device, has_master)
        if kind not in members:
            members[kind] = []
        members[kind].append((param, state, index))
    found = []
    for (device, has_master), those in members.items():
        states = [state for _, state, _ in those]
        absent = len(rule.moments) - len(of_state.moments)
        columns = Columns(
            device=device,
            params=[param for param, _, _ in those],
            grads=[param.grad for param, _, _ in those],  # type: ignore[misc]
            options=of_op,
            moments=[[state[name] for state in states] for name in of_state.moments]
            + [[] for _ in range(absent)],
            units=[state[name] for name in of_state.unit_entries for state in states],
        )
        if of_state.counts_steps:
            columns.state_steps = [state["step"] for state in states]
        if has_master:
            columns.masters = [state["master_param"] for state in states]
        if of_state.has_ema:
            columns.averages = [state["ema_param"] for state in states]
        if first:
            columns.first_indices = [first[index] for _, _, index in those]
        found.append(columns)
    if all(map(is_plain, (group["params"][index] for index in indices))):
        return found
    return [localized(columns) for columns in found]
