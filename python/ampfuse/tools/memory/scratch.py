"""The memory that an operator allocates and frees in one call, where it is worth counting."""

from typing import Any

import torch
from torch import Tensor

from ampfuse import _C

# The numbers of c10::ScalarType, which operators take as arguments.
SCALAR_TYPES = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}

LINEAR_LOSSES = ("ampfuse::linear_cross_entropy_forward", "ampfuse::linear_cross_entropy_backward")


def count_in_loss(operator: Any, args: tuple[Any, ...], for_gpu: bool) -> int:
    """Return the bytes that a linear cross-entropy allocates and frees; 0 for other operators."""
    if operator.name() not in LINEAR_LOSSES:
        return 0
    given = dict(zip((one.name for one in operator._schema.arguments), args, strict=False))
    dtype, logits_dtype = SCALAR_TYPES[given["dtype"]], SCALAR_TYPES[given["logits_dtype"]]
    if for_gpu and not (given["chunk_classes"] or given["group"]):
        logits_dtype = dtype  # the default on a GPU
    return _C.linear_cross_entropy_workspace(
        given["hidden"],
        given["weight"],
        dtype=dtype,
        logits_dtype=logits_dtype,
        weight_grad_dtype=SCALAR_TYPES[given["weight_grad_dtype"]],
        chunk_rows=given["chunk_rows"],
        chunk_classes=given["chunk_classes"],
        with_gradient=any(given["output_mask"]),
        on_gpu=for_gpu,
    )


def count_on_cpu(operator: Any, args: tuple[Any, ...], results: Any) -> int:
    """Return the bytes of copies that torch's operators for images make on a CPU.

    Convolutions copy weight and images to a layout of their own, as measured with torch 2.11. What
    they need on a GPU depends on the algorithm that cuDNN chooses, and is not counted.
    """
    match operator.name():
        case "aten::convolution":
            return _bytes(results) + _bytes(args[1])
        case "aten::convolution_backward":
            return sum(map(_bytes, args[:3]))
        case "aten::native_batch_norm_backward":
            return _bytes(args[1])
    return 0


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
