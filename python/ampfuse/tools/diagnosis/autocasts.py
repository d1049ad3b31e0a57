"""Watches the autocasts of a program: whether they are enabled, and in which dtype."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import wraps
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ampfuse._warning import warn_if_no_gpu
from ampfuse.tools.hooks import replace

SIZE = 256  # of the matrices that are multiplied, which takes some 20 ms if float16 is slow
SLOW = 2.0  # times the time in other dtypes
NO_GPU = "CUDA is not available or torch_xla is imported. Disabling autocast."  # torch's


class Autocasts:
    """The autocasts that a program makes outside of compiled functions, until `exits` closes."""

    def __init__(self, exits: ExitStack) -> None:
        self.enabled: set[tuple[str, torch.dtype]] = set()
        """Kinds of devices, with the dtypes to which autocast converts there."""
        self.trains_in_float16 = False
        """True if autocast converts to float16 where gradients are computed."""
        self.is_gpu_missing = False
        """True if the program enables autocast for a GPU, and there is none."""
        replace(exits, torch.autocast, "__init__", self._watched(torch.autocast.__init__))

    def _watched(self, init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def watched(
            context: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            if enabled and device_type == "cuda" and warn_if_no_gpu(NO_GPU):
                self.is_gpu_missing = True
                enabled = False  # torch would warn again, and name this file
            init(context, device_type, dtype, enabled, cache_enabled)
            if context._enabled:
                self.enabled.add((device_type, context.fast_dtype))
                is_float16 = context.fast_dtype == torch.float16
                self.trains_in_float16 |= is_float16 and torch.is_grad_enabled()

        return watched

    def describe(self, dtype: torch.dtype) -> str | None:
        """Return why autocast has changed nothing in a program with weights of a dtype, or None."""
        if self.enabled or not self.is_gpu_missing:
            return None
        name = str(dtype).removeprefix("torch.")
        return f'torch.autocast("cuda") does nothing on a CPU: this trained in {name}'

    def explain_float16(self, has_scaler: bool) -> Iterator[str]:
        """Return hints about float16: without a scaler, or on a CPU that is slow at it."""
        if self.trains_in_float16 and not has_scaler:
            yield (
                "Autocast converts to float16, and no GradScaler is used. Unless the program "
                "scales its loss itself, gradients up to 2.98e-8 become 0: use "
                "torch.amp.GradScaler, or bfloat16, which needs none."
            )
        if ("cpu", torch.float16) not in self.enabled:
            return
        measures = {": a product of matrices": time_product}
        if has_convolutions():
            measures[": a convolution, with its backward pass,"] = time_convolution
        for what, measure in measures.items():
            float16, bfloat16, float32 = (
                min(measure(dtype) for _ in range(3))
                for dtype in (torch.float16, torch.bfloat16, torch.float32)
            )
            if float16 > SLOW * max(bfloat16, float32):
                yield (
                    f"This program is slow in float16 on this CPU{what} takes "
                    f"{float16 / bfloat16:.0f} times as long as in bfloat16. Use "
                    'torch.autocast("cpu", torch.bfloat16), which needs no scaler.'
                )
                return


def has_convolutions() -> bool:
    """Return True if a module of the program is a convolution."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    # isinstance() would ask the objects, of which any may answer by code of its own.
    return any(issubclass(type(one), kinds) for one in gc.get_objects())


def time_product(dtype: torch.dtype) -> float:
    """Return the seconds that a product of two matrices takes on the CPU."""
    matrix = torch.ones(SIZE, SIZE, dtype=dtype)
    begin = perf_counter()
    torch.mm(matrix, matrix)
    return perf_counter() - begin


@torch.enable_grad()
def time_convolution(dtype: torch.dtype) -> float:
    """Return the seconds that a small convolution and its backward pass take on the CPU."""
    images = torch.ones(8, 8, 16, 16, dtype=dtype, requires_grad=True)
    filters = torch.ones(8, 8, 3, 3, dtype=dtype, requires_grad=True)
    begin = perf_counter()
    torch.autograd.grad(torch.conv2d(images, filters).sum(), [images, filters])
    return perf_counter() - begin
