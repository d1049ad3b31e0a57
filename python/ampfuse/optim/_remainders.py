"""Split masters: the parameter holds the upper half, and the state the remainder."""

from typing import Any

import torch
from torch import Tensor

from ampfuse.gradients.shards import local, sharded_like


def exported(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state as it is saved: with float32 masters in place of remainders.

    A remainder alone has no meaning, and neither NCCL nor Gloo supports its dtype.
    """
    master = state.get("master_param")
    if not isinstance(master, Tensor) or master.dtype != torch.int16:
        return state
    return {**state, "master_param": join(param, master)}


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 tensor as the kernels do (math/split_float.h)."""
    bits = local(master).contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16  # wraps around for some NaNs, replaced below
    upper = torch.where(local(master).isnan(), (bits >> 16) | 0x40, upper)
    bfloat16 = upper.to(torch.int16).view(torch.bfloat16)
    return sharded_like(master, bfloat16), sharded_like(master, bits.to(torch.int16))


def join(param: Tensor, remainder: Tensor) -> Tensor:
    bfloat16 = local(param.detach()).contiguous()
    upper = bfloat16.view(torch.int16).to(torch.int32) << 16
    lower = local(remainder).contiguous().to(torch.int32)
    # Adding a negative remainder, with its sign extended, borrows from the upper half.
    bits = torch.where(bfloat16.isnan(), upper | (lower & 0xFFFF), upper + lower)
    joined = bits.view(torch.float32)
    # A remainder that would turn a number into NaN is ignored (math/split_float.h).
    is_spoilt = joined.isnan() & ~bfloat16.isnan()
    return sharded_like(param, torch.where(is_spoilt, upper.view(torch.float32), joined))
