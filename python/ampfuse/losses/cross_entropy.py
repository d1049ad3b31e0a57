"""Cross-entropy that reads logits once and leaves their gradient behind, scaled before rounding."""

from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from typing_extensions import Unpack  # which torch brings along

from ampfuse.losses._options import (
    DEFAULTS,
    LossOptions,
    changed_options,
    checked_scaler,
    op_options,
    scale_of,
)
from ampfuse.losses._transforms import raise_if_refused, refusal


class CrossEntropyMetrics(NamedTuple):
    """What the same pass computes for each row, in the shape of index targets; without gradients.

    `lse` is the log-sum-exp of the logits after softcap, and `entropy` the entropy of the predicted
    distribution in nats, both of the loss's dtype. `argmax` is the class of the largest logit.
    `correct` is True where that is the target, or the most probable class; False for ignored rows.
    """

    lse: Tensor
    entropy: Tensor
    argmax: Tensor
    correct: Tensor


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
) -> Tensor | tuple[Tensor, CrossEntropyMetrics]:
    """`torch.nn.functional.cross_entropy`, in float32 for 16-bit logits, also under autocast.

    Logits have shape `(C)`, `(N, C)` or `(N, C, d1, ...)`, with the classes next to each other in
    memory or what belongs to a class (others are copied, and so is what has few entries of a
    class, below 16 or a sixteenth of the classes); targets are classes (int64, int32, uint8) or
    probabilities.

    - `grad_scale`: what backward will be called with, `scaler.scale_tensor()` say, or a number. The
      gradient is multiplied by it before it is rounded to the logits' dtype, so that it may come
      from forward: a float16 gradient of a mean over thousands of rows that is formed without it is
      mostly zeros. With any other number in backward a pass over the gradient multiplies it by the
      ratio and rounds once more; what is beyond the range of the logits' dtype by then, above or
      below, stays so.
    - `denominator`: what to divide by instead of the batch's own weight, with `reduction="mean"`.
      The same one for the parts of a batch makes their gradients add up to the whole batch's, and
      a part whose rows are all ignored no NaN. Under DDP, which averages gradients: the count of
      all processes, divided by how many these are.
    - `z_loss`: adds `z_loss * lse**2` to the loss of each row that is not ignored, where `lse` is
      the row's log-sum-exp. Class weights do not multiply this term, but `reduction="mean"` divides
      it by what it divides the rest of the loss by: the sum of the targets' class weights (the
      number of rows where targets are probabilities), or `denominator`.
    - `softcap`: logits become `softcap * tanh(logits / softcap)` first.
    - `return_metrics`: also what the pass tells of each row, of ignored ones too, as
      `CrossEntropyMetrics`.

    Where logits require grad and the loss is a mean or a sum, their gradient comes from the same
    read of them. They are kept for backward instead with `reduction="none"`, for float16 logits
    without `grad_scale`, for probabilities that require grad, and inside `torch.compile`. There is
    no second derivative, no forward mode and no `torch.func.grad`: where one is needed, use torch's
    function.

    On a CPU each thread holds up to 8 bytes for each class of its row, 16 for float64 logits.

    A target that is no class raises IndexError; on a GPU that row's loss is NaN and a later call
    raises, since nothing waits (the environment variable AMPFUSE_TARGETS=trap stops the GPU).

    >>> import torch, ampfuse
    >>> logits = torch.tensor([[2.0, 0.0], [0.0, 0.0]], requires_grad=True)
    >>> loss = ampfuse.cross_entropy(logits, torch.tensor([0, 1]))
    >>> loss.backward()
    >>> loss.detach(), logits.grad
    (tensor(0.4100), tensor([[-0.0596,  0.0596],
            [ 0.2500, -0.2500]]))
    """
    options = op_options(
        input, reduction, ignore_index, label_smoothing, grad_scale, denominator, z_loss, softcap
    )
    try:
        if not return_metrics:
            loss: Tensor = torch.ops.ampfuse.cross_entropy(input, target, weight, **options)
            return loss
        results = torch.ops.ampfuse.cross_entropy.metrics(input, target, weight, **options)
    except RuntimeError as error:
        raise_if_refused("cross_entropy", error)
        raise
    return results[0], CrossEntropyMetrics(*results[1:])


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
) -> Tensor:
    """`cross_entropy` of `(N, C)` logits that nobody needs any more: their gradient replaces them.

    So there is no memory but theirs, and gradients of what they were made of may share it; under
    `no_grad` they are overwritten, too. Not for leaves, nor inside `torch.compile`; `reduction` is
    "mean" or "sum", and float16 logits need `grad_scale`.

    >>> import torch, ampfuse
    >>> hidden = torch.ones(1, 2, requires_grad=True)
    >>> logits = hidden * torch.tensor([2.0, 0.0])
    >>> ampfuse.cross_entropy_(logits, torch.tensor([0])).backward()
    >>> logits.detach(), hidden.grad
    (tensor([[-0.1192,  0.1192]]), tensor([[-0.2384,  0.0000]]))
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            "cross_entropy_: input cannot be overwritten inside torch.compile: cross_entropy is "
            "for that"
        )
    dual = forward_ad.unpack_dual(input)  # type: ignore[no-untyped-call]
    if dual.tangent is not None:  # torch would refuse it too, but after it was overwritten
        raise refusal("cross_entropy_")
    options = op_options(
        input, reduction, ignore_index, label_smoothing, grad_scale, denominator, z_loss, softcap
    )
    try:
        loss: Tensor = torch.ops.ampfuse.cross_entropy_(input, target, weight, **options)[0]
    except RuntimeError as error:
        raise_if_refused("cross_entropy_", error)
        raise
    return loss


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` by `ampfuse.cross_entropy`.

    With `scaler`, ours or torch's, it expects the gradient that `scaler.scale(loss).backward()`
    brings. Losses are not to be divided or weighted then: in float16 what is above the range before
    stays above it. The parts of an accumulated batch are called with its `denominator` instead.

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
        super().__init__(
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
        self.scaler = checked_scaler(scaler)
        self.z_loss = z_loss
        self.softcap = softcap

    def extra_repr(self) -> str:
        """The options that differ from the defaults."""
        return changed_options(self, DEFAULTS)

    def forward(
        self, input: Tensor, target: Tensor, denominator: Tensor | float | None = None
    ) -> Tensor:
        """The loss; `denominator` is a number, or a tensor of one, as in `cross_entropy`."""
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            grad_scale=scale_of(self.scaler, input.device),
            denominator=denominator,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )
