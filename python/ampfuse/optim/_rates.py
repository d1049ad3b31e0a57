"""Learning rates in tensors, which captured graphs read at fixed addresses."""

from typing import Any

import torch
from torch import Tensor


def keep_rates(loaded: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Copy loaded rates to the present tensors; groups with different rates stop sharing one."""
    places: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        if isinstance(group["lr"], Tensor) and "lr" in loaded[index]:
            places.setdefault(id(group["lr"]), []).append(index)
    for sharing in places.values():
        rate = groups[sharing[0]]["lr"]
        values = [torch.as_tensor(loaded[index]["lr"]) for index in sharing]
        numbers = {value.item() for value in values} if len(values) > 1 else set()
        if rate.is_floating_point() and len(numbers) <= 1:
            rate.copy_(values[0])
            values = [rate] * len(values)
        else:
            dtype = rate.dtype if rate.is_floating_point() else torch.float64
            values = [value.to(rate.device, dtype, copy=True) for value in values]
        for index, value in zip(sharing, values, strict=True):
            loaded[index]["lr"] = value
