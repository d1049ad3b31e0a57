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
_fused_adam = bind_operator(torch.ops.ampfuse.fused_adam.default)
_fused_adam_write_back_grads = bind_operator(torch.ops.ampfuse.fused_adam.write_back_grads)
_update_scale = bind_operator(torch.ops.ampfuse.update_scale.default)


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


def fused_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    masters: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled_weight_decay: bool,
    write_back_grads: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    total_norm: Tensor | None = None,
    max_norm: float | None = None,
    grad_norm: Tensor | None = None,
    adopt_params: bool = False,
) -> None:
    """Take one step of Adam or AdamW in place, as `torch.optim` does. `ampfuse.Adam` calls this.

    Entries of the lists with the same index have the same shape and device. A step is skipped,
    counters included, if `found_inf` is not 0, or if the inverse of `grad_scale` is not a finite
    float32.

    Args:
        params: Parameters, float16, bfloat16, float32 or float64 in any mixture; written.
        grads: Gradients, float16, bfloat16 or float32 in any mixture, and float64 for float64
            parameters; written only with `write_back_grads`.
        exp_avgs: First moments, float32 or bfloat16, float64 for float64 parameters; written.
        exp_avg_sqs: Second moments, of the same dtypes; written.
        max_exp_avg_sqs: The largest second moments so far, written; empty without `amsgrad`.
        state_steps: Float32 scalars, the numbers of steps, which are incremented.
        masters: Float32 masters, or int16 bits that a bfloat16 lacks; written. May be empty.
        lr: Learning rate, a tensor with one element.
        beta1: Decay rate of the first moments.
        beta2: Decay rate of the second moments.
        weight_decay: Factor of weight decay.
        eps: Number added to the denominator.
        amsgrad: Divide by the largest second moments so far.
        maximize: Ascend instead of descend.
        decoupled_weight_decay: Decay the weights, as AdamW does, instead of adding to the
            gradients.
        write_back_grads: Replace `grads` by the unscaled, clipped gradients.
        grad_scale: Float32 scalar by which gradients are divided, or None.
        found_inf: Float32 scalar that skips the step unless it is 0, or None.
        total_norm: Norm of the gradients before unscaling and clipping; with `max_norm`.
        max_norm: After unscaling, gradients are scaled so that their norm is at most this.
        grad_norm: Receives `total_norm / grad_scale`, even if the step is skipped, or None.
        adopt_params: Elements of a parameter that differ from the rounded float32 master count as
            written by other code, and are copied to the master. A CPU compares all elements; a GPU
            one in 128 and the last one of each chunk of 2048, and the whole chunk if one differs.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A list has another length, a tensor another shape or device, or an option is
            invalid.

    Examples:
        >>> import torch, ampfuse
        >>> param, state = torch.tensor([1.0]), [[torch.zeros(1)], [torch.zeros(1)]]
        >>> options = dict(beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8)
        >>> options |= dict(amsgrad=False, maximize=False, decoupled_weight_decay=True)
        >>> ampfuse.ops.fused_adam(
        ...     [param], [torch.tensor([5.0])], *state, [], [torch.zeros(())],
        ...     lr=torch.tensor(0.25), **options
        ... )
        >>> param
        tensor([0.7500])
    """
    columns = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs,
        "state_steps": state_steps,
        "masters": masters,
    }
    try:
        (_fused_adam_write_back_grads if write_back_grads else _fused_adam)(
            *columns.values(),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
            grad_scale=grad_scale,
            found_inf=found_inf,
            total_norm=total_norm,
            max_norm=max_norm,
            grad_norm=grad_norm,
            adopt_params=adopt_params,
        )
    except RuntimeError as error:
        explain("fused_adam", error, **columns)


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    counters: Tensor,
    found_infs: Sequence[Tensor],
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 1,
    hysteresis_refill: str = "growth",
    dynamic: bool = True,
    skip_outliers: float | None = None,
    history: Tensor | None = None,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
) -> None:
    """Update a loss scale in place. `ampfuse.GradScaler` calls this.

    With the defaults this is torch's `_amp_update_scale_`, bit by bit, except that the scale also
    grows if the tracker is past the growth interval already.

    Args:
        scale: Float32 scalar, written.
        growth_tracker: Int32 scalar, the number of steps without overflow in a row; written.
        counters: Int64 tensor, written: the hysteresis tracker (if it is above 1, an overflow
            lowers it instead of the scale), the overflows in a row, and the number of updates.
        found_infs: Float32 scalars; the step has overflowed if any of them is not 0.
        growth_factor: Factor by which the scale grows, at least 1.
        backoff_factor: Factor by which the scale backs off, above 0 and at most 1.
        growth_interval: Number of steps in a row without overflow after which the scale grows.
        min_scale: The lower limit of backing off, above 0, or None.
        max_scale: The upper limit of growing, above 0, or None.
        hysteresis: Number of overflows that it takes to lower the scale.
        hysteresis_refill: `"growth"` or `"clean_step"`: what restores `hysteresis`.
        dynamic: False keeps the scale constant.
        skip_outliers: A norm is an outlier if its logarithm is so many standard deviations (each
            at least 0.1) above the mean; a number above 1, or None.
        history: Float32 tensor (n, 3) with a row for each of the last n updates: the scale before
            it, 1 if it has overflowed or 2 if it was skipped as an outlier, and `norm`. Update i is
            written to row i mod n.
        norm: Float32 scalar, the norm of the unscaled gradients, or None.
        norms: Float64 tensor of the number of norms so far, the mean and the variance of their
            logarithms, and the limit above which a norm is an outlier; written. It begins as 0, 0,
            0 and infinity.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A tensor has another size or device, or an option is out of range.

    Examples:
        >>> import torch, ampfuse
        >>> scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
        >>> counters, flags = torch.tensor([1, 0, 0]), [torch.tensor(0.0), torch.tensor(1.0)]
        >>> options = dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
        >>> ampfuse.ops.update_scale(scale, tracker, counters, flags, **options)
        >>> scale, counters
        (tensor(4.), tensor([1, 1, 1]))
    """
    try:
        _update_scale(
            scale,
            growth_tracker,
            counters,
            found_infs,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
            hysteresis_refill=hysteresis_refill,
            dynamic=dynamic,
            skip_outliers=skip_outliers,
            history=history,
            norm=norm,
            norms=norms,
        )
    except RuntimeError as error:
        explain("update_scale", error, found_infs=found_infs)
