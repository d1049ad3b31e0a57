"""Masters of which a parameter has the upper half, and the state its remainder."""

from typing import Any

import torch
from torch import Tensor

from ampfuse.optim._shards import local, sharded_like


def exported(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state as it is saved: remainders as the float32 masters that they stand for.

    By themselves they mean nothing, and no collective operation knows their dtype.
    """
    master = state.get("master_param")
    if not isinstance(master, Tensor) or master.dtype != torch.int16:
        return state
    return {**state, "master_param": join(param, master)}


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split a float32 tensor as the kernels do (math/fused_adam_remainder.h)."""
    bits = local(master).contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16  # wraps around at the top of the negative NaNs, which go below
    upper = torch.where(local(master).isnan(), (bits >> 16) | 0x40, upper)
    bfloat16 = upper.to(torch.int16).view(torch.bfloat16)
    return sharded_like(master, bfloat16), sharded_like(master, bits.to(torch.int16))


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 tensor that `split` gave."""
    bfloat16 = local(param.detach()).contiguous()
    upper = bfloat16.view(torch.int16).to(torch.int32) << 16
    lower = local(remainder).contiguous().to(torch.int32)
    # A negative remainder brings its own sign bits, which is to borrow from the upper half.
    bits = torch.where(bfloat16.isnan(), upper | (lower & 0xFFFF), upper + lower)
    joined = bits.view(torch.float32)
    # As in math/fused_adam_remainder.h, no remainder makes a NaN of another number.
    is_spoilt = joined.isnan() & ~bfloat16.isnan()
    return sharded_like(param, torch.where(is_spoilt, upper.view(torch.float32), joined))
