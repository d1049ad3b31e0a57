"""Cross-entropy that reads logits once for loss and gradient, which it scales before rounding."""

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import Unpack  # a dependency of torch

from ampfuse.losses.options import (
    CrossEntropyMetrics,
    LossOptions,
    changed_options,
    checked_scaler,
    compute_loss,
    options_of,
    refusal,
)


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_metrics: Literal[False] = False,
    **options: Unpack[LossOptions],
) -> Tensor: ...


@overload
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    return_metrics: Literal[True],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, CrossEntropyMetrics]: ...


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    grad_scale: Tensor | float | None = None,
    denominator: Tensor | float | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_metrics: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, CrossEntropyMetrics]:
    """Compute `torch.nn.functional.cross_entropy`; the arithmetic of 16-bit logits is float32.

    Logits are read in place if the class dimension has stride 1, or if at least max(16, C/16)
    positions of a class are contiguous; others are copied.

    If logits require grad, the pass that computes the loss also computes their gradient. In some
    cases logits are kept instead, and backward computes the gradient: with `reduction="none"`, for
    float16 logits without `grad_scale`, for probabilities that require grad, and inside
    `torch.compile`. Second derivatives, forward mode and `torch.func.grad` are not supported: use
    torch's function for them.

    On a CPU each thread allocates up to 8 bytes per class, 16 for float64 logits.

    A target out of range raises IndexError. On a GPU the loss of its row is NaN and a later call
    raises, since the host does not wait; the environment variable AMPFUSE_TARGETS=trap stops the
    GPU at once.

    Args:
        input: Logits of shape `(C)`, `(N, C)` or `(N, C, d1, ...)` for C classes, float16,
            bfloat16, float32 or float64.
        target: Classes (int64, int32 or uint8) in the shape of `input` without C, or probabilities
            in the shape of `input` and of a floating-point dtype.
        weight: A factor for the loss of each class, of shape `(C)`, or None.
        ignore_index: Rows with this target have loss and gradient 0, and are not counted by a mean.
        reduction: `"mean"` divides the sum of the rows' losses by the sum of their targets' weights
            (for probabilities, by the number of rows). `"sum"` adds them up, `"none"` returns them.
        label_smoothing: The part of each target, from 0 to 1, that is spread over all classes.
        grad_scale: The gradient that backward will receive, for example `scaler.scale_tensor()`, or
            a number. The logits' gradient is multiplied by it before it is rounded to their dtype.
            Without it, a float16 gradient of a mean over thousands of rows would be mostly zeros if
            it were computed in forward, so backward computes it. If backward receives another
            number than `grad_scale`, one more pass multiplies the gradient by the ratio and rounds
            again; elements that have already overflowed or underflowed the logits' dtype stay so.
        denominator: Divides the loss instead of the rows' total weight, with `reduction="mean"`. If
            all parts of a batch get the same one, their gradients add up to the whole batch's, and
            the loss of a part whose rows are all ignored is not NaN. Under DDP, which averages
            gradients, pass the count over all ranks, divided by the number of ranks.
        z_loss: Adds `z_loss * lse**2` to the loss of each row that is not ignored, where `lse` is
            the row's log-sum-exp. Class weights do not multiply this term. `reduction="mean"`
            divides it like the rest of the loss: by `denominator`, or by the sum of the targets'
            class weights (for probabilities, by the number of rows).
        softcap: First replaces logits by `softcap * tanh(logits / softcap)`.
        return_metrics: Also returns `CrossEntropyMetrics` of all rows, including ignored ones.

    Returns:
        The loss, 0-dim, or with `reduction="none"` of the shape of class targets; float32 for
        16-bit logits, else of their dtype. With `return_metrics`, a pair of the loss and the
        metrics.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape does not fit, or an option is out of range.
        IndexError: A target is out of range, in this call or, on a GPU, in an earlier one.
        NotImplementedError: torch.func or forward mode would differentiate the loss.

    Examples:
        >>> import torch, ampfuse
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]], requires_grad=True)
        >>> loss = ampfuse.cross_entropy(logits, torch.tensor([0, 1]))
        >>> loss.backward()
        >>> loss.detach(), logits.grad
        (tensor(0.4100), tensor([[-0.0596,  0.0596],
                [ 0.2500, -0.2500]]))
    """
    return compute_loss(  # type: ignore[no-any-return]
        cross_entropy,
        unknown,
        {"input": input, "target": target},
        return_metrics,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        grad_scale=grad_scale,
        denominator=denominator,
        z_loss=z_loss,
        softcap=softcap,
    )


def cross_entropy_(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    grad_scale: Tensor | float | None = None,
    denominator: Tensor | float | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    **unknown: Any,
) -> Tensor:
    """Compute `cross_entropy` of `(N, C)` logits, and overwrite these with their gradient.

    Only use this for logits that are not needed any more. It allocates no memory of their size, and
    gradients of tensors from which they were computed may share the logits' memory. The logits are
    overwritten under `no_grad`, too. `torch.compile` does not support this function.

    Args:
        input: Logits of shape `(N, C)`, which are overwritten; not a leaf that requires grad.
        target: Classes of shape `(N)` (int64, int32 or uint8), or probabilities `(N, C)`.
        weight: A factor for the loss of each class, of shape `(C)`, or None.
        ignore_index: Rows with this target have loss and gradient 0, and are not counted by a mean.
        reduction: `"mean"` or `"sum"`.
        label_smoothing: The part of each target, from 0 to 1, that is spread over all classes.
        grad_scale: The gradient that backward will receive; float16 logits need it.
        denominator: Divides the loss instead of the rows' total weight, with `reduction="mean"`.
        z_loss: Adds `z_loss * lse**2` to each row's loss, as in `cross_entropy`.
        softcap: First replaces logits by `softcap * tanh(logits / softcap)`.

    Returns:
        The loss, 0-dim; float32 for 16-bit logits, else of their dtype.

    Raises:
        RuntimeError: `input` is a leaf that requires grad. Other errors are those of
            `cross_entropy`.

    Examples:
        >>> import torch, ampfuse
        >>> hidden = torch.ones(1, 2, requires_grad=True)
        >>> logits = hidden * torch.tensor([2.0, 0.0])
        >>> ampfuse.cross_entropy_(logits, torch.tensor([0])).backward()
        >>> logits.detach(), hidden.grad
        (tensor([[-0.1192,  0.1192]]), tensor([[-0.2384,  0.0000]]))
    """
    dual = forward_ad.unpack_dual(input)  # type: ignore[no-untyped-call]
    if dual.tangent is not None:  # torch refuses it only after `input` is overwritten
        raise refusal("cross_entropy_")
    results = compute_loss(
        cross_entropy_,
        unknown,
        {"input": input, "target": target},
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        grad_scale=grad_scale,
        denominator=denominator,
        z_loss=z_loss,
        softcap=softcap,
    )
    return results[0]  # type: ignore[no-any-return]


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss`, computed by `ampfuse.cross_entropy`.

    With `scaler`, ours or torch's, it expects the gradient that `scaler.scale(loss).backward()`
    passes. Do not divide or weight the loss then: a float16 gradient that has overflowed before the
    division stays infinite. Call it with `denominator` for the parts of an accumulated batch
    instead.

    Args:
        weight: A factor for the loss of each class, of shape `(C)`, or None. It becomes a buffer.
        ignore_index: Rows with this target have loss and gradient 0, and are not counted by a mean.
        reduction: `"mean"`, `"sum"` or `"none"`, as in `cross_entropy`.
        label_smoothing: The part of each target, from 0 to 1, that is spread over all classes.
        scaler: The GradScaler, ampfuse's or torch's, that scales this loss; None if none does.
        z_loss: Adds `z_loss * lse**2` to each row's loss, as in `cross_entropy`.
        softcap: First replaces logits by `softcap * tanh(logits / softcap)`.

    Raises:
        TypeError: `scaler` is not a scaler.

    Examples:
        >>> import torch, ampfuse
        >>> scaler = ampfuse.GradScaler("cpu", 1024.0)
        >>> criterion = ampfuse.CrossEntropyLoss(scaler=scaler)
        >>> logits = torch.zeros(1, 2, dtype=torch.float16, requires_grad=True)
        >>> scaler.scale(criterion(logits, torch.tensor([0]))).backward()
        >>> logits.grad
        tensor([[-512.,  512.]], dtype=torch.float16)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        scaler: Any = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        if not isinstance(weight, Tensor | None):
            kind = type(weight).__name__
            raise TypeError(
                f"weight: expected None or a tensor of class weights, got {kind}; other arguments "
                "have to be named, as in scaler=scaler"
            )
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self.scaler = checked_scaler(scaler)
        self.z_loss = z_loss
        self.softcap = softcap

    extra_repr = changed_options

    def forward(
        self, input: Tensor, target: Tensor, denominator: Tensor | float | None = None
    ) -> Tensor:
        """Compute the loss; errors are those of `cross_entropy`.

        Args:
            input: Logits, as in `cross_entropy`.
            target: Classes or probabilities, as in `cross_entropy`.
            denominator: Divides the loss with `reduction="mean"`, as in `cross_entropy`.

        Returns:
            The loss, as of `cross_entropy`.
        """
        return cross_entropy(input, target, self.weight, **options_of(self, input, denominator))
