"""Checks of state dicts before anything is loaded from them."""

from typing import Any

import torch
from torch import Tensor

from ampfuse._texts import listed
from ampfuse.gradients.shards import is_dtensor, local
from ampfuse.optim import _coded
from ampfuse.optim._rule import Rule
from ampfuse.optim.options import is_number


def check_saved(rule: Rule, saved: Any, param: Tensor, index: int) -> None:
    """Raise for the state of another parameter, or of another optimizer."""
    where = f"loaded state dict: parameter {index}"
    if not isinstance(saved, dict):
        raise TypeError(f"{where}: expected a dict, got {kind_of(saved)}")
    missing = {*rule.needed_state} - decoded_names(rule, saved)
    if saved and missing:
        raise KeyError(
            f"{where}: expected {rule.name}'s {listed(rule.needed_state)}, got "
            f"{sorted(map(str, saved))}"
        )
    for name, value in saved.items():
        where = f"loaded state dict: {name} of parameter {index}"
        if name == "step":
            check_number(where, value, param.is_meta)
            _check_counter(where, value)
        elif name in (*rule.moments, "master_param", "ema_param"):
            check_tensor(where, value, param.is_meta)
            check_fits(where, value, param)
    for position, moment in enumerate(rule.moments):
        if moment not in saved and not saved.keys().isdisjoint(_coded.saved_names(moment)):
            check_codes(saved, moment, param, index, is_signed=position == 0)


def decoded_names(rule: Rule, saved: dict[str, Any]) -> set[str]:
    """Return the names of a state's entries, with those of moments in place of codes and units."""
    coded = {name for name in rule.moments if saved.keys() >= {*_coded.saved_names(name)}}
    return {*saved, *coded}


def check_codes(
    saved: dict[str, Any], moment: str, param: Tensor, index: int, *, is_signed: bool
) -> None:
    """Raise unless the codes and units of a moment fit the parameter."""
    groups = (param.numel() + _coded.GROUP - 1) // _coded.GROUP
    shapes: tuple[tuple[int, ...], ...] = (tuple(param.shape), (groups,))
    dtypes = (torch.int8 if is_signed else torch.uint8, torch.bfloat16)
    for name, shape, dtype in zip(_coded.saved_names(moment), shapes, dtypes, strict=True):
        where = f"loaded state dict: {name} of parameter {index}"
        if name not in saved:
            raise KeyError(f"{where}: codes and units are saved together, and this is missing")
        value = saved[name]
        check_tensor(where, value, param.is_meta)
        if value.shape != shape:
            raise ValueError(f"{where}: expected shape {shape}, got {tuple(value.shape)}")
        if value.dtype != dtype:
            raise TypeError(f"{where}: expected {dtype}, got {value.dtype}")


def check_number(where: str, value: Any, may_be_meta: bool) -> None:
    if not isinstance(value, Tensor):
        if not is_number(value):
            raise TypeError(f"{where}: expected a number or a tensor, got {kind_of(value)}")
        return
    check_tensor(where, value, may_be_meta)
    if value.numel() != 1 or value.is_complex():
        raise ValueError(f"{where}: expected one real number, got {_described(value)}")


def _check_counter(where: str, value: Any) -> None:
    """Raise for an invalid number of steps. One on a GPU is not checked: the host would wait."""
    if isinstance(value, Tensor) and (is_dtensor(value) or value.device.type != "cpu"):
        return
    if not 0 <= value < float("inf"):
        raise ValueError(f"{where}: expected a finite number, at least 0, got {value}")


def check_tensor(where: str, value: Any, may_be_meta: bool) -> None:
    """Raise unless this is a dense tensor with memory, from which numbers can be copied."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{where}: expected a tensor, got {kind_of(value)}")
    if value.is_nested:
        raise ValueError(f"{where}: expected a dense tensor, got a nested one")
    if value.layout != torch.strided or value.is_quantized:
        raise ValueError(f"{where}: expected a dense tensor, got {_described(value)}")
    shard = local(value)
    is_freed = shard.numel() > 0 and shard.untyped_storage().nbytes() == 0
    if is_freed or (value.is_meta and not may_be_meta):
        raise ValueError(f"{where}: expected a tensor with memory, got {_described(value)}")


def check_fits(where: str, value: Tensor, param: Tensor) -> None:
    if value.shape != param.shape:
        raise ValueError(f"{where}: expected shape {tuple(param.shape)}, got {tuple(value.shape)}")
    if not (value.is_floating_point() or value.is_complex()):
        raise ValueError(
            f"{where}: expected a floating-point tensor, got {value.dtype}; state_dict() converts "
            "remainders to float32"
        )
    if value.is_complex() != param.is_complex():
        kind = "a complex" if param.is_complex() else "a real"
        raise ValueError(f"{where}: expected {kind} tensor like the parameter, got {value.dtype}")
    if is_dtensor(value) != is_dtensor(param):
        kinds = ("a plain tensor", "a DTensor")
        raise ValueError(
            f"{where}: expected {kinds[is_dtensor(param)]} as the parameter, "
            f"got {kinds[is_dtensor(value)]}"
        )


def _described(value: Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}, {value.layout}, on {value.device}"


def kind_of(value: Any) -> str:
    return type(value).__name__
