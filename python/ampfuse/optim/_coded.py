"""Moments in 8 bits: a state has codes and units in place of a moment (`ampfuse.ops`)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse.gradients.shards import local, sharded_like

NAME = "8bit"  # the dtype of moments, as an option
GROUP = 32  # elements with one unit


def code_names(moment: str) -> tuple[str, str]:
    """Return the names of the entries that hold a moment's codes and units."""
    return f"{moment}_codes", f"{moment}_units"


def new_codes(param: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes and units of a moment of zeros. A DTensor has units of this rank's shard."""
    dtype = torch.int8 if is_signed else torch.uint8
    codes = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    groups = (local(codes).numel() + GROUP - 1) // GROUP
    return codes, torch.zeros(groups, dtype=torch.bfloat16, device=local(codes).device)


def encode(moment: Tensor, is_signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes and units of a moment, rounded to nearest."""
    codes, units = ops.encode_moment(local(moment), is_signed=is_signed)
    return sharded_like(moment, codes), units


def decode(codes: Tensor, units: Tensor) -> Tensor:
    """Return a float32 moment."""
    return sharded_like(codes, ops.decode_moment(local(codes), units))


def find(state: dict[str, Any], moment: str) -> Tensor | None:
    """Return a moment of a state, decoded if it has codes, or None if it has neither."""
    codes, units = (state.get(name) for name in code_names(moment))
    if codes is not None and units is not None:
        return decode(codes, units)
    return state.get(moment)


def decoded(state: dict[str, Any], moments: Iterable[str]) -> dict[str, Any]:
    """Return a parameter's state with float32 moments in place of codes and units."""
    result = dict(state)
    for moment in moments:
        names = code_names(moment)
        if all(isinstance(state.get(name), Tensor) for name in names):
            codes, units = (result.pop(name) for name in names)
            result[moment] = decode(codes, units)
    return result
