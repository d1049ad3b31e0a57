"""The operators on lists of gradients."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampfuse._arguments import explain
from ampfuse._graphs import bind_operator

_multi_tensor_norm = bind_operator(torch.ops.ampfuse.multi_tensor_norm.default)
_multi_tensor_unscale = bind_operator(torch.ops.ampfuse.multi_tensor_unscale.default)
_multi_tensor_unscale_norm = bind_operator(torch.ops.ampfuse.multi_tensor_unscale_norm.default)
_multi_tensor_clip = bind_operator(torch.ops.ampfuse.multi_tensor_clip.default)


class MultiTensorNorm(NamedTuple):
    """The results of one read of a tensor list."""

    total_norm: Tensor
    """0-dim; float32, or float64 if any tensor is float64 or complex128."""
    norms: Tensor
    """One norm per tensor."""
    found_inf: Tensor
    """0-dim float32: 1 if any element is NaN or infinite, else 0."""
    first_nonfinite: Tensor
    """0-dim int64: index of the first tensor with such an element, or -1."""
    nonfinite_count: Tensor
    """0-dim int64: number of such tensors."""


class UnscaledNorm(NamedTuple):
    """The norms after unscaling; fields as in `MultiTensorNorm`."""

    total_norm: Tensor
    norms: Tensor
    first_nonfinite: Tensor
    nonfinite_count: Tensor


def multi_tensor_norm(
    tensors: Sequence[Tensor], ord: float = 2.0, *, dtype: torch.dtype | None = None
) -> MultiTensorNorm:
    """Compute the norm of a list as one vector, of order 1, 2 or inf, in one read.

    Args:
        tensors: The list; an empty one has norm 0.
        ord: The order of the norm: 1, 2 or inf.
        dtype: The dtype of the norms, float32 or float64; by default float64 if any tensor is
            float64 or complex128. Sums are float64, so a float64 norm of float32 tensors is
            infinite only if an element is.

    Returns:
        The norms and the non-finite elements, as tensors on the device.

    Examples:
        >>> import torch, ampfuse
        >>> result = ampfuse.ops.multi_tensor_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        >>> result.total_norm, result.norms
        (tensor(5.), tensor([3., 4.]))
    """
    try:
        return MultiTensorNorm(*_multi_tensor_norm(tensors, ord, dtype=dtype))
    except RuntimeError as error:
        explain("multi_tensor_norm", error, tensors=tensors)


def multi_tensor_unscale(tensors: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply in place by `inv_scale`; set `found_inf` to 1 if a result is NaN or infinite.

    Args:
        tensors: The list, which is written in place.
        found_inf: Float32 tensor with one element, which is set to 1 or stays; it is never cleared.
        inv_scale: Float32 tensor with one element. If it is 1, nothing is written to `tensors`.

    Examples:
        >>> import torch, ampfuse
        >>> grads, found_inf = [torch.tensor([2.0, 8.0])], torch.zeros(())
        >>> ampfuse.ops.multi_tensor_unscale(grads, found_inf, torch.tensor(0.5))
        >>> grads, found_inf
        ([tensor([1., 4.])], tensor(0.))
    """
    try:
        _multi_tensor_unscale(tensors, found_inf, inv_scale)
    except RuntimeError as error:
        explain("multi_tensor_unscale", error, tensors=tensors)


def multi_tensor_unscale_norm(
    tensors: Sequence[Tensor],
    found_inf: Tensor,
    inv_scale: Tensor,
    ord: float = 2.0,
    *,
    dtype: torch.dtype | None = None,
) -> UnscaledNorm:
    """Do `multi_tensor_unscale`, and compute the norms of its results in the same pass.

    Args:
        tensors: The list, which is written in place.
        found_inf: Float32 tensor with one element, which is set to 1 or stays; it is never cleared.
        inv_scale: Float32 tensor with one element, on the same device.
        ord: The order of the norm: 1, 2 or inf.
        dtype: The dtype of the norms, as in `multi_tensor_norm`.

    Returns:
        The norms of the results, as tensors on the device.

    Examples:
        >>> import torch, ampfuse
        >>> grads, found_inf = [torch.tensor([6.0, 8.0])], torch.zeros(())
        >>> ampfuse.ops.multi_tensor_unscale_norm(grads, found_inf, torch.tensor(0.5)).total_norm
        tensor(5.)
    """
    try:
        norms = _multi_tensor_unscale_norm(tensors, found_inf, inv_scale, ord, dtype=dtype)
        return UnscaledNorm(*norms)
    except RuntimeError as error:
        explain("multi_tensor_unscale_norm", error, tensors=tensors)


def multi_tensor_clip(tensors: Sequence[Tensor], total_norm: Tensor, max_norm: float) -> None:
    """Multiply in place by `min(1, max_norm / (total_norm + 1e-6))`, computed on the device.

    At factor 1 the tensors are neither read nor written.

    Args:
        tensors: The list, which is written in place.
        total_norm: Float32 or float64 tensor with one element, on the same device.
        max_norm: The largest norm that is left as it is.

    Examples:
        >>> import torch, ampfuse
        >>> grads = [torch.tensor([3.0, 4.0])]
        >>> ampfuse.ops.multi_tensor_clip(grads, torch.tensor(5.0), 1.0)
        >>> grads
        [tensor([0.6000, 0.8000])]
    """
    try:
        _multi_tensor_clip(tensors, total_norm, max_norm)
    except RuntimeError as error:
        explain("multi_tensor_clip", error, tensors=tensors)
