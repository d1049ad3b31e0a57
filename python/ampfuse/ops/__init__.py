"""Typed functions for the operators on gradients, optimizer state and the loss scale.

All results stay on the tensors' device, and the host does not wait. `tensors` is a list of strided
tensors of any shapes, on one device, of dtypes float16, bfloat16, float32, float64, complex64 and
complex128 in any mixture. All operators work inside `torch.compile(fullgraph=True)`, except the
norm of an empty list, which has no device. They have no derivatives: call them under
`torch.no_grad()` if tensors require grad.

They raise TypeError for an argument of a wrong type or dtype, and ValueError for an option out of
range, a sparse tensor, one on another device, and written tensors that share memory.

The device decides whether a function writes. Even if it writes nothing, tensors with gaps in memory
are copied to dense ones and back on a GPU.
"""

from ampfuse.ops.coded_moments import CodedMoment, decode_moment, encode_moment
from ampfuse.ops.fused_adam import fused_adam
from ampfuse.ops.fused_sgd import fused_sgd
from ampfuse.ops.multi_tensor import (
    MultiTensorNorm,
    UnscaledNorm,
    multi_tensor_clip,
    multi_tensor_norm,
    multi_tensor_unscale,
    multi_tensor_unscale_norm,
)
from ampfuse.ops.update_scale import update_scale

__all__ = [
    "CodedMoment",
    "MultiTensorNorm",
    "UnscaledNorm",
    "decode_moment",
    "encode_moment",
    "fused_adam",
    "fused_sgd",
    "multi_tensor_clip",
    "multi_tensor_norm",
    "multi_tensor_unscale",
    "multi_tensor_unscale_norm",
    "update_scale",
]
