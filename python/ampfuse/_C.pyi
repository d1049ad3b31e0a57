from typing import Any

import torch
from torch import Tensor

def build_info() -> dict[str, Any]: ...
def has_cuda() -> bool: ...
def check_targets() -> None: ...
def grads_and_kinds(params: list[Tensor]) -> tuple[list[Any], bytes]: ...
def ordinary_grads(
    params: list[Tensor], allow_fp16: bool
) -> tuple[list[tuple[torch.device, list[Tensor], list[Tensor]]], list[int]]: ...
def writes(tensors: list[Tensor]) -> tuple[int, int]: ...
def linear_cross_entropy_workspace(
    hidden: Tensor,
    weight: Tensor,
    *,
    dtype: torch.dtype,
    logits_dtype: torch.dtype,
    weight_grad_dtype: torch.dtype,
    chunk_rows: int | None,
    chunk_classes: int | None,
    with_gradient: bool,
    on_gpu: bool,
) -> int: ...
