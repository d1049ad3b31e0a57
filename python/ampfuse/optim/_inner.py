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
from ampfuse._arguments import described
from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse.gradients.devices import largest, move_to
from ampfuse.gradients.lists import resolve_conjugate_grad
from ampfuse.gradients.norms import rounded
from ampfuse.gradients.shards import is_dtensor, local, place_gradient, sharded_like, sharding_of
from ampfuse.optim import _state
from ampfuse.optim._clips import Clip
from ampfuse.optim._columns import Columns

PARAMS = ("params", "param_names")  # entries of a group that are no options

# Options of the fused optimizers' groups, with what to do instead.
OPTIONS_OF_OTHERS = {
    "max_grad_norm": "give the constructor one limit for all gradients",
    "master_weights": "all 16-bit parameters that require a gradient have masters",
}


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
        check_pair(param, own)
        if param.grad is None:
            continue
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


def check_pair(param: Tensor, own: Tensor) -> None:
    """Raise if the inner optimizer's parameter cannot be stepped in place of this one."""
    is_16_bit = param.dtype in DTYPES_16_BIT
    if own is not param and not is_16_bit:
        raise TypeError(
            "Mastered: expected the parameters that it was made with, in their first dtypes, got "
            f"another one of {param.dtype}: cast or replace parameters before the optimizer is made"
        )
    if param.grad is None:
        return
    if own is param and is_16_bit:
        raise TypeError(
            "Mastered: expected 16-bit gradients only of parameters that had 16 bits and required "
            f"a gradient when it was made, got one of {param.dtype}, which has no master: "
            "make the optimizer after the model is cast and unfrozen"
        )
    if param.grad.is_sparse:
        raise RuntimeError(
            "Mastered: expected dense gradients, got a sparse one of a parameter of shape "
            f"{tuple(param.shape)}"
        )


def place_master(own: Tensor, param: Tensor) -> None:
    """Move a master to the device of its parameter."""
    if own.device != param.device:
        source = param if own.is_meta else own
        own.data = source.detach().to(param.device, torch.float32)


@torch.no_grad()
def adopt_writes(own: Tensor, param: Tensor) -> None:
    """Make a master adopt the elements of its parameter that other code has written.

    In those elements the parameter is no longer its master rounded. The host does not wait.
    """
    place_master(own, param)
    here, there = local(param.detach()), local(own.detach())
    if here.device.type == "cpu" and torch.equal(there.to(here.dtype), here):
        return  # a GPU writes the master in any case, since the host would wait for this answer
    _state.adopt_param(here, there)


def with_masters(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group for the inner optimizer, with masters in place of 16-bit parameters.

    Frozen parameters are not stepped, so they need no masters.
    """
    params: list[Any] = [
        torch.nn.Parameter(_state.new_master(param, torch.float32))
        if param.dtype in DTYPES_16_BIT and param.requires_grad
        else param
        for param in group["params"]
    ]
    if "param_names" in group:
        params = list(zip(group["param_names"], params, strict=True))
    return {**{name: group[name] for name in group if name not in PARAMS}, "params": params}


def check_make(make: Any) -> None:
    """Raise unless `make` is a function."""
    if not callable(make):
        raise TypeError(
            "make: expected a function, for example lambda groups: torch.optim.Muon(groups, "
            f"lr=0.02), got {described(make)}"
        )


def make_inner(make: Any, groups: list[dict[str, Any]]) -> Optimizer:
    """Call `make`; raise unless it returns an optimizer of these groups that needs no closure."""
    inner = make([dict(group) for group in groups])
    if not isinstance(inner, Optimizer):
        raise TypeError(f"make: expected a function that returns an optimizer, got {inner!r} of it")
    given = [
        [id(param[1] if isinstance(param, tuple) else param) for param in group["params"]]
        for group in groups
    ]
    if given != [list(map(id, group["params"])) for group in inner.param_groups]:
        raise TypeError(
            "make: expected an optimizer of the parameters that it got, in their groups and order"
        )
    closure = inspect.signature(inner.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TypeError(
            f"make: expected an optimizer whose step needs no closure, got {type(inner).__name__}: "
            "use it without Mastered, with float32 parameters"
        )
    return inner


def check_sizes(groups: list[dict[str, Any]], inner_groups: list[dict[str, Any]]) -> None:
    """Raise if other code has added groups or parameters to either, or removed some."""
    sizes, inner_sizes = ([len(group["params"]) for group in of] for of in (groups, inner_groups))
    if sizes != inner_sizes:
        raise ValueError(
            f"param_groups: expected groups of {inner_sizes} parameters, as the inner optimizer "
            f"has, got {sizes}: add parameters by add_param_group()"
        )


def refuse_options_of_others(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise for options that only the fused optimizers' groups have. The step would ignore them.

    `defaults`: the options of the inner optimizer, which may have one of the same name.
    """
    for name, remedy in OPTIONS_OF_OTHERS.items():
        if name in group and name not in defaults:
            raise ValueError(
                f"{name}: expected no such option in a group of Mastered, got {group[name]!r}: "
                f"{remedy}"
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


def unscaled_clips(
    columns: list[list[Columns]], clips: list[Clip | None], scale: Tensor | None
) -> tuple[list[Clip | None], Tensor | None]:
    """Return clips with the norm of unscaled gradients, and this norm, if there are any groups."""
    if not clips or clips[0] is None:
        return clips, None
    norm = clips[0].total_norm
    norm = norm if scale is None else norm / move_to(scale, norm.device)
    norm = rounded(norm, [grad for of_group in columns for one in of_group for grad in one.grads])
    return [Clip(norm, clips[0].max_norm, None)] * len(clips), norm


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
    """Set 16-bit parameters that have gradients to their masters, rounded to the nearest."""
    for of_group in columns:
        for one in of_group:
            if one.masters:
                torch._foreach_copy_(one.params, one.masters)
