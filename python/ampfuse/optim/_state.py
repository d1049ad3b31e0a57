"""What Adam keeps for a parameter: created at its first step, converted, rebuilt."""

from typing import Any

import torch
from torch import Tensor

from ampfuse._capture import is_capturing
from ampfuse.optim._options import STATE_DTYPES, Kept, state_dtype_name
from ampfuse.optim._remainders import join, split

HALVES = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

Spares = dict[Tensor, Tensor]  # of parameters: masters that are to be made anew, in their place


def ensure(state: dict[str, Any], param: Tensor, kept: Kept, spares: Spares) -> None:
    """Create what is missing of a parameter's state, and convert what is kept in another way."""
    if "step" not in state:
        refuse_in_capture()
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    else:  # whoever puts one there may do as torch, which has it on the host
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)
    dtype = moment_dtype(param, kept)
    for name in MOMENTS[: 3 if kept.amsgrad else 2]:
        if name not in state:
            refuse_in_capture()
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        elif isinstance(state[name], Tensor) and state[name].dtype != dtype:
            state[name] = state[name].to(dtype)
    ensure_master(state, param, master_dtype(param, kept), spares)


@torch.no_grad()
def ensure_master(
    state: dict[str, Any], param: Tensor, dtype: torch.dtype | None, spares: Spares
) -> None:
    """Of this dtype, or none."""
    master = state.get("master_param")
    if master is None and dtype is not None:
        refuse_in_capture()
        spare = spares.pop(param, None)
        fresh = new_master(param, dtype)
        if spare is not None and (spare.dtype, spare.shape) == (dtype, fresh.shape):
            state["master_param"] = spare.copy_(fresh)
        else:
            state["master_param"] = fresh
    elif master is not None and master.dtype != dtype:
        # A model that was cast, or a group that keeps its masters in another way from now on.
        numbers = master
        if master.dtype == torch.int16:
            numbers = join(param, master) if param.dtype == torch.bfloat16 else param.detach()
        del state["master_param"]
        put_master(state, numbers, param, dtype)


def refuse_in_capture() -> None:
    """State that a graph makes it would make anew at every replay."""
    if not torch.compiler.is_compiling() and is_capturing():
        raise RuntimeError(
            "this step would make the optimizer's state, and so would each replay of the graph "
            "that is being captured: take one step before"
        )


def moment_dtype(param: Tensor, kept: Kept) -> torch.dtype:
    """Of a parameter's moments: `state_dtype`, but what is more precise stays as it is.

    Where there is none, torch's, but for float16, whose range squares leave.
    """
    if param.dtype not in (*HALVES, torch.float32):
        return param.dtype
    if kept.state_dtype is None:
        return torch.float32 if param.dtype == torch.float16 else param.dtype
    return STATE_DTYPES[state_dtype_name(kept.state_dtype)]


def master_dtype(param: Tensor, kept: Kept) -> torch.dtype | None:
    """float32 for masters, int16 for remainders, None for parameters that need none."""
    if param.dtype not in HALVES or kept.master_weights is False:
        return None
    return torch.int16 if kept.master_weights == "remainder" else torch.float32


def new_master(param: Tensor, dtype: torch.dtype) -> Tensor:
    """The master of a parameter as it is: a bfloat16 number lacks no bits of its own."""
    if dtype == torch.int16:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return param.detach().to(dtype, memory_format=torch.preserve_format)


def renew_master(state: dict[str, Any], param: Tensor) -> None:
    """Make it from the parameter again, in its place."""
    master = state["master_param"]
    master.copy_(new_master(param, master.dtype))


def put(
    state: dict[str, Any],
    name: str,
    value: Tensor,
    dtype: torch.dtype | None = None,
    like: Tensor | None = None,
) -> None:
    """Copy it into the tensor that is there, if it is one of that kind, or into a new one."""
    dtype = dtype or value.dtype
    like = value if like is None else like
    there = state.get(name)
    if not isinstance(there, Tensor) or (there.dtype, there.shape) != (dtype, like.shape):
        there = torch.empty_like(like, dtype=dtype, memory_format=torch.preserve_format)
        state[name] = there
    there.copy_(value)


def put_master(
    state: dict[str, Any], value: Tensor, param: Tensor, dtype: torch.dtype | None
) -> None:
    """A float32 master, as it is kept: of this dtype, or not at all."""
    if dtype is None:
        state.pop("master_param", None)
        if param.dtype not in HALVES:  # it is its own master now
            param.copy_(value)
    elif dtype == torch.int16:
        parameter, remainder = split(value.to(param.device, torch.float32))
        param.copy_(parameter)
        put(state, "master_param", remainder, dtype, param)
    else:
        put(state, "master_param", value, dtype, param)
