"""The tensors that `Mastered` gives its inner optimizer: masters, and unscaled gradients."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse import ops
from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse.gradients.devices import largest, move_to
from ampfuse.gradients.lists import resolve_conjugate_grad
from ampfuse.gradients.shards import is_dtensor, local, place_gradient, sharded_like, sharding_of
from ampfuse.optim._clips import Clip
from ampfuse.optim._columns import Columns

PARAMS = ("params", "param_names")  # entries of a group that are no options


@dataclass
class InnerColumns(Columns):
    """Parameters with gradients on one device, all with masters or all without."""

    inner: list[Tensor] = field(default_factory=list)
    """The inner optimizer's parameters, of which `masters` may be shards."""


Member = tuple[Tensor, Tensor, Tensor]  # a parameter, the inner optimizer's, and the gradient


def read_inner_columns(group: dict[str, Any], inner: dict[str, Any]) -> list[Columns]:
    """Return what has gradients in a group; `inner` is the inner optimizer's group."""
    found: dict[tuple[torch.device, bool], list[Member]] = {}
    for param, own in zip(group["params"], inner["params"], strict=True):
        if param.grad is None:
            continue
        if (param.dtype in DTYPES_16_BIT) == (own is param):
            raise TypeError(
                f"Mastered: expected parameters of their first dtypes, got one of {param.dtype}: "
                "cast the model before the optimizer is made"
            )
        resolve_conjugate_grad(param)
        member = param, own, place_gradient(param, param.grad)
        found.setdefault((param.device, own is param), []).append(member)
    columns: list[Columns] = []
    for (device, are_own), members in found.items():
        params, inners, grads = map(list, zip(*members, strict=True))
        columns.append(
            InnerColumns(
                device,
                params=list(map(local, params)),
                grads=list(map(local, grads)),
                shardings=list(map(sharding_of, grads)),
                masters=[] if are_own else list(map(local, inners)),
                dtensors=list(filter(is_dtensor, params)),
                inner=inners,
            )
        )
    return columns


def new_master(param: Tensor) -> Tensor:
    """Return a float32 parameter that equals a 16-bit one."""
    return torch.nn.Parameter(param.detach().to(torch.float32))


@torch.no_grad()
def renew_master(own: Tensor, param: Tensor) -> None:
    """Set a master to its parameter, which may have moved to another device."""
    if own.device == param.device:
        own.copy_(param)
    else:
        own.data = new_master(param).data


def with_masters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group for the inner optimizer, with masters in place of 16-bit parameters."""
    params: list[Any] = [
        new_master(param) if param.dtype in DTYPES_16_BIT else param for param in group["params"]
    ]
    if "param_names" in group:
        params = list(zip(group["param_names"], params, strict=True))
    return {**{name: group[name] for name in group if name not in PARAMS}, "params": params}


def check_inner(inner: Any, groups: list[dict[str, Any]]) -> None:
    """Raise unless this is an optimizer of these groups, whose step needs no closure."""
    if not isinstance(inner, Optimizer):
        raise TypeError(f"make: expected a function that returns an optimizer, got {inner!r} of it")
    given = [param for group in groups for param in group["params"]]
    given = [param[1] if isinstance(param, tuple) else param for param in given]
    found = [param for group in inner.param_groups for param in group["params"]]
    if list(map(id, given)) != list(map(id, found)):
        raise TypeError("make: expected an optimizer of the parameters that it got, in their order")
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"make: expected an optimizer whose step needs no closure, got {type(inner).__name__}: "
            "use it without Mastered, with float32 parameters"
        )


def must_skip(found_inf: Tensor | None, inverse: Tensor | None) -> bool:
    """Return True if a step with these signals is skipped; the host waits if there are any.

    `inverse`: that of the scale, which is infinite if the scale is too small.
    """
    flags = [] if found_inf is None else [found_inf]
    if inverse is not None:
        flags.append(inverse.isinf().float())
    return len(flags) > 0 and bool(
        largest([move_to(flag, flags[0].device) for flag in flags]).item()
    )


@contextmanager
def unscaled_gradients(
    columns: list[list[Columns]], clips: list[Clip | None], inverse: Tensor | None
) -> Iterator[None]:
    """Give the inner optimizer's parameters unscaled and clipped gradients in this block."""
    before: list[tuple[Tensor, Tensor | None]] = []
    try:
        for of_group, clip in zip(columns, clips, strict=True):
            for one in of_group:
                assert isinstance(one, InnerColumns)
                grads = changed_gradients(one, clip, inverse)
                for own, grad in zip(one.inner, grads, strict=True):
                    before.append((own, own.grad))
                    own.grad = sharded_like(own, grad)
        yield
    finally:
        for own, was in before:
            own.grad = was


def changed_gradients(one: InnerColumns, clip: Clip | None, inverse: Tensor | None) -> list[Tensor]:
    """Return gradients in the dtypes of the inner parameters, unscaled and clipped."""
    is_changed = clip is not None or inverse is not None
    pairs = zip(one.grads, one.inner, strict=True)
    grads = [grad.to(own.dtype, copy=is_changed) for grad, own in pairs]
    if inverse is not None:
        unused = torch.zeros((), dtype=torch.float32, device=one.device)
        ops.multi_tensor_unscale(grads, unused, move_to(inverse, one.device))
    if clip is not None:
        ops.multi_tensor_clip(grads, move_to(clip.total_norm, one.device), clip.max_norm)
    return grads


def round_masters(columns: list[list[Columns]]) -> None:
    """Set 16-bit parameters to their masters, rounded to the nearest."""
    for of_group in columns:
        for one in of_group:
            if one.masters:
                torch._foreach_copy_(one.params, one.masters)
