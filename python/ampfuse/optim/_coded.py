"""Moments in 8 bits: a state has a moment's codes under its name, and their units beside it.

Saved codes have a name of their own, so that torch's class never takes them for a moment.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ampfuse import ops
from ampfuse.gradients.shards import local, sharded_like

NAME = "8bit"  # the dtype of moments, as an option
GROUP = 32  # elements with one unit


def units_name(moment: str) -> str:
    """Return the name of the units of a moment."""
    return f"{moment}_units"


def saved_names(moment: str) -> tuple[str, str]:
    """Return the names of a moment's codes and units in a state dict."""
    return f"{moment}_codes", units_name(moment)


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
    """Return a moment of a state, decoded if it is coded, or None if it is missing."""
    value, units = state.get(moment), state.get(units_name(moment))
    return value if value is None or units is None else decode(value, units)


def exported(state: dict[str, Any], moments: Iterable[str]) -> dict[str, Any]:
    """Return a parameter's state with codes under the names that they have in a state dict."""
    names = {name: saved_names(name)[0] for name in moments if units_name(name) in state}
    return {names.get(name, name): value for name, value in state.items()}


def decoded(saved: dict[str, Any], moments: Iterable[str]) -> dict[str, Any]:
    """Return a saved state with float32 moments in place of codes and units."""
    result = dict(saved)
    for moment in moments:
        names = saved_names(moment)
        if all(isinstance(saved.get(name), Tensor) for name in names):
            codes, units = (result.pop(name) for name in names)
            result[moment] = decode(codes, units)
    return result
