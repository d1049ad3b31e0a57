"""Checks of the arguments of `GraphedStep`."""

from typing import Any

import torch
from torch import Tensor

from ampfuse._arguments import checked_count


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def expect(name: str, value: Any, kind: type, described: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {described}, got {name_of(type(value))}")


def device_of(sample: list[Tensor]) -> torch.device:
    """Return the device of all sample tensors; raise unless it is one CPU or one GPU."""
    for index, tensor in enumerate(sample):
        expect(f"sample[{index}]", tensor, Tensor, "a tensor")
    devices = {tensor.device for tensor in sample}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices))) or "nothing"
        raise ValueError(f"sample: expected tensors on one CPU or one GPU, got {names}")
    return next(iter(devices))


def checked_split(micro_batches: int, sample: list[Tensor]) -> int:
    """Return `micro_batches`; raise unless each sample tensor can be split into that many parts."""
    micro_batches = checked_count("micro_batches", micro_batches, least=1)
    if micro_batches > 1:
        for index, tensor in enumerate(sample):
            if tensor.dim() == 0 or tensor.shape[0] % micro_batches:
                raise ValueError(
                    f"sample[{index}]: expected a first dimension that {micro_batches} "
                    f"micro_batches divide, got shape {tuple(tensor.shape)}"
                )
    return micro_batches
