"""Cross-entropy that reads logits once and leaves their gradient behind, scaled before rounding."""

from numbers import Number
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ampfuse._transforms import raise_if_refused, refusal

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


class CrossEntropyMetrics(NamedTuple):
    """What the same pass tells of each row, in the shape of index targets; without derivatives.

    `lse` is the log-sum-exp of the logits, after softcap, and `entropy` that of the predicted
    distribution, in nats, both of the loss's dtype. `argmax` is the class of the largest logit, and
    `correct` whether that is the target, or the most probable one; never for ignored rows.
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
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    grad_scale: Tensor | float | None = None,
    denominator: Tensor | float | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_metrics: Literal[False] = False,
) -> Tensor: ...


@overload
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
    return_metrics: Literal[True],
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
    options = _options(
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
    loss, lse, entropy, argmax = results
    correct = _correct(argmax, target, ignore_index, class_dim=min(1, input.dim() - 1))
    return loss, CrossEntropyMetrics(lse, entropy, argmax, correct)


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
    options = _options(
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
        self.scaler = _checked_scaler(scaler)
        self.z_loss = z_loss
        self.softcap = softcap

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        defaults = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
        return _told(self, defaults | {"z_loss": 0.0, "softcap": None})

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
            grad_scale=_scale_of(self.scaler, input.device),
            denominator=denominator,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )


def _told(module: Any, defaults: dict[str, Any]) -> str:
    """What of a loss differs from the defaults."""
    given = {name: getattr(module, name) for name in defaults}
    if module.scaler is not None:
        given["scaler"] = type(module.scaler).__name__
    return ", ".join(f"{name}={v}" for name, v in given.items() if v != defaults.get(name))


def _checked_scaler(scaler: Any) -> Any:
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise TypeError(f"scaler: expected a GradScaler or None, got {type(scaler).__name__}")
    return scaler


def _scale_of(scaler: Any, device: torch.device) -> Tensor | None:
    """What `scaler.scale(loss).backward()` will bring; `torch.amp.GradScaler` keeps its tensor."""
    # Compiled, gradients are formed in backward, which is told.
    if scaler is None or torch.compiler.is_compiling() or not scaler.is_enabled():
        return None
    if hasattr(scaler, "_live_scale"):
        return scaler._live_scale()  # type: ignore[no-any-return]
    one = torch.ones((), dtype=torch.float32, device=device)
    return scaler.scale(one)  # type: ignore[no-any-return]


def _options(
    input: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    grad_scale: Tensor | float | None,
    denominator: Tensor | float | None,
    z_loss: float,
    softcap: float | None,
) -> dict[str, Any]:
    """As arguments of the operators."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: expected none, mean or sum, got {reduction!r}")
    for name, constant in (("z_loss", z_loss), ("softcap", softcap)):
        if isinstance(constant, Tensor):  # would be read by the host, and have no derivative
            raise TypeError(f"{name}: expected a number, got a tensor")
    return {
        "reduction": REDUCTIONS[reduction],
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "grad_scale": _number("grad_scale", grad_scale, torch.float32, input),
        "denominator": _number("denominator", denominator, torch.float64, input),
        "z_loss": z_loss,
        "softcap": softcap,
    }


def _number(
    name: str, value: Tensor | float | None, dtype: torch.dtype, input: Tensor
) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    if not torch.compiler.is_compiling() and not isinstance(value, Number):
        hint = ": CrossEntropyLoss takes scalers" if hasattr(value, "get_scale") else ""
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}{hint}")
    # A product, since a constant would be compiled anew for each value.
    return torch.ones((), dtype=dtype, device=input.device) * value


def _correct(argmax: Tensor, target: Tensor, ignore_index: int, class_dim: int) -> Tensor:
    if target.is_floating_point():
        return argmax == target.argmax(class_dim)
    # Numbers are compared in the tensor's dtype, and -100 would be 156 in bytes.
    target = target.reshape(argmax.shape).long()
    return (argmax == target) & (target != ignore_index)
