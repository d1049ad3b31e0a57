"""Cross-entropy of hidden states times a weight, without all logits in memory at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack  # a dependency of torch

from ampfuse._graphs import eager_only
from ampfuse.gradients.shards import is_dtensor
from ampfuse.losses.options import (
    CrossEntropyMetrics,
    LinearLossOptions,
    changed_options,
    check_call,
    checked_scaler,
    compute_loss,
    options_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # missing in some builds of torch


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_metrics: Literal[False] = False,
    **options: Unpack[LinearLossOptions],
) -> Tensor: ...


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    return_metrics: Literal[True],
    **options: Unpack[LinearLossOptions],
) -> tuple[Tensor, CrossEntropyMetrics]: ...


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    grad_scale: Tensor | float | None = None,
    denominator: Tensor | float | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_rows: int | None = None,
    chunk_classes: int | None = None,
    logits_dtype: torch.dtype | None = None,
    accumulate_into: Tensor | None = None,
    process_group: ProcessGroup | None = None,
    first_class: int | None = None,
    num_classes: int | None = None,
    return_metrics: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, CrossEntropyMetrics]:
    """Compute `cross_entropy(hidden @ weight.T + bias, target)` in a fraction of the memory.

    Hidden states, weight and bias must have the same dtype; autocast converts them once. If
    products are in float16 or bfloat16, losses are float32, logits have `logits_dtype`, and the
    weight's gradient is summed in float32. This sum is then rounded to the weight's dtype, unless
    `weight.grad_dtype` is float32. float32 gradients of 16-bit weights are supported by
    optimizers of ampfuse and by torch's SGD, but not by other optimizers, torch.compile and DDP.

    One chunk of rows at a time is turned into logits, losses and gradients. With reductions mean
    and sum, backward then only multiplies the gradients by the number that it receives. With
    `reduction="none"` it computes the logits again. Gradients that are not required cost nothing.

    Second derivatives, forward mode and `torch.func.grad` are not supported: use torch's
    cross_entropy of the logits for them. Targets out of range are treated as in `cross_entropy`.

    Args:
        hidden: Hidden states of shape `(..., H)`.
        weight: The weight of the last layer, of shape `(V, H)` for V classes.
        target: Classes of shape `(...)` (int64, int32 or uint8), or probabilities `(..., V)`.
        bias: The bias of the last layer, of shape `(V)`, or None.
        class_weight: A factor for the loss of each class, of shape `(V)`, or None.
        ignore_index: Rows with this target have loss and gradient 0, and are not counted by a mean.
        reduction: `"mean"`, `"sum"` or `"none"`, as in `cross_entropy`.
        label_smoothing: The part of each target, from 0 to 1, that is spread over all classes.
        grad_scale: The gradient that backward will receive, for example `scaler.scale_tensor()`, or
            a number. If backward receives another number, one more pass multiplies the gradients by
            the ratio and, unless this is a power of two, rounds 16-bit ones a second time. For a
            loss that is divided by n pass `1 / n`, or a `denominator`. Without `grad_scale`,
            float16 gradients are computed from losses that are not divided yet.
        denominator: Divides the loss instead of the rows' total weight, as in `cross_entropy`.
        z_loss: Adds `z_loss * lse**2` to each row's loss, as in `cross_entropy`.
        softcap: First replaces logits by `softcap * tanh(logits / softcap)`.
        chunk_rows: Number of rows per chunk. By default as many as fit 64 MiB of logits on a CPU
            (at least 128), or 1 GiB of logits and their gradient on a GPU (at least 2048). On a GPU
            all rows are one chunk if that takes no more memory: several chunks need a float32 sum
            of the weight's gradient. The same rows in the same chunks give the same bits. On a CPU
            the number of threads must be the same, too, because some matrix products depend on it
            (for example those of bfloat16 without AVX512-BF16).
        chunk_classes: Take all rows, and this number of classes at a time, instead of chunks of
            rows. Memory is then needed for the logits of these classes, 96 bytes per row and tile
            of classes, and a float32 sum of the hidden states' gradient. If the weight's gradient
            is bfloat16, this is the least, since no float32 sum of it is kept. Logits are computed
            twice: four products instead of three. Allowed with reductions mean and sum, without
            `chunk_rows` and `process_group`.
        logits_dtype: The dtype in which logits are stored if products are in float16 or bfloat16:
            float32 or the dtype of the products. float32 logits are not rounded. Others are rounded
            as by `F.linear`: a bfloat16 logit of 40 is off by up to 1/8, and a float16 logit beyond
            65504 is infinite. In return a GPU needs 2 bytes for a logit and its gradient instead of
            6. The default is float32 on a CPU and with a `process_group` or `chunk_classes`,
            otherwise the dtype of the products. A `process_group` and `chunk_classes` allow only
            float32. A CPU allows float32, and bfloat16 if it has bfloat16 products.
        accumulate_into: A float32 tensor (float64 for float64 inputs) of the weight's shape, to
            which backward adds the weight's gradient in place. The weight itself then gets none,
            but DDP waits for one: do not use this for weights inside DDP. For `ampfuse.AdamW` to
            use the buffer, set `weight.grad_dtype = torch.float32`, `weight.grad = buffer`, and
            call `zero_grad(set_to_none=False)`. If an embedding shares the weight, its part of the
            gradient is in `weight.grad`.
        process_group: Ranks of `torch.distributed` that each hold a shard of the classes (tensor
            parallelism). Weight, bias and probabilities are those of this rank's classes. All ranks
            pass the same hidden states, the same targets (numbered among all classes),
            `class_weight` of all classes and the same options, request the same gradients, and call
            backward with the same number. All get the same loss, to the last bit, and the whole
            gradient of the hidden states, summed in float32. Besides that sum they exchange a few
            numbers per row. A loss is NaN if the shards do not cover all classes, or if no shard
            has the row's target. Other differences between the ranks' arguments are not detected.
        first_class: The first class of this rank's shard; with `num_classes`. By default all shards
            have the same size and lie in the order of ranks.
        num_classes: The number of all classes of the group. Padding of a vocabulary counts, too.
        return_metrics: Also returns `CrossEntropyMetrics` of all rows, including ignored ones.

    Returns:
        The loss, 0-dim, or with `reduction="none"` of shape `(...)`; float32, or float64 for
        float64 inputs. With `return_metrics`, a pair of the loss and the metrics.

    Raises:
        TypeError: A tensor is a DTensor. Other errors are those of `cross_entropy`.
        ValueError: Options are not allowed with each other.

    Examples:
        >>> import torch, ampfuse
        >>> hidden = torch.ones(1, 2, requires_grad=True)
        >>> weight = torch.tensor([[1.0, 0.0], [0.0, -1.0]], requires_grad=True)
        >>> loss = ampfuse.linear_cross_entropy(hidden, weight, torch.tensor([0]))
        >>> loss.backward()
        >>> loss.detach(), hidden.grad
        (tensor(0.1269), tensor([[-0.1192, -0.1192]]))
    """
    tensors = {"hidden": hidden, "weight": weight, "target": target}
    options: dict[str, Any] = {
        "bias": bias,
        "class_weight": class_weight,
        "accumulate_into": accumulate_into,
    }
    for name, tensor in (tensors | options).items():
        # A weight does not show whether its mesh is data parallel or tensor parallel, so this
        # function cannot choose between gathering and reducing.
        if is_dtensor(tensor):
            raise TypeError(
                f"linear_cross_entropy: {name}: expected a plain tensor, got a DTensor. With "
                "fully_shard, call it in the forward of the module whose fully_shard group holds "
                "the weight, or shard the head as a module of its own, for example a "
                f"LinearCrossEntropyLoss. With tensor parallelism pass {name}.to_local() and "
                "process_group="
            )
    if process_group is not None:
        check_call(linear_cross_entropy, unknown, tensors)  # before the weight's shape is read
        options["vocab_shard"] = _vocab_shard(process_group, weight, first_class, num_classes)
        options["group"] = process_group.group_name
    elif first_class is not None or num_classes is not None:
        raise ValueError("first_class, num_classes: only allowed with process_group")
    return compute_loss(  # type: ignore[no-any-return]
        linear_cross_entropy,
        unknown,
        tensors,
        return_metrics,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        grad_scale=grad_scale,
        denominator=denominator,
        z_loss=z_loss,
        softcap=softcap,
        chunk_rows=chunk_rows,
        chunk_classes=chunk_classes,
        logits_dtype=logits_dtype,
        **options,
    )


def _vocab_shard(
    process_group: ProcessGroup, weight: Tensor, first_class: int | None, num_classes: int | None
) -> list[int]:
    """Return [ranks, first class, classes]; by default for equal shards in the order of ranks."""
    _check_shard(process_group, first_class=first_class, num_classes=num_classes)
    if (first_class is None) != (num_classes is None):
        raise ValueError("first_class, num_classes: expected both or neither")
    size, classes = process_group.size(), weight.shape[0]
    if first_class is None or num_classes is None:
        first_class, num_classes = process_group.rank() * classes, size * classes
    return [size, first_class, num_classes]


@eager_only
def _check_shard(process_group: ProcessGroup, **classes: int | None) -> None:
    if not hasattr(process_group, "group_name"):
        raise TypeError(
            "process_group: expected a torch.distributed.ProcessGroup that this rank belongs to, "
            f"got {type(process_group).__name__}"
        )
    for name, number in classes.items():
        if number is not None and not isinstance(number, int):
            raise TypeError(f"{name}: expected an int, got {type(number).__name__}")


class LinearCrossEntropyLoss(torch.nn.Module):
    """The last layer of a model and its loss, computed by `linear_cross_entropy`.

    `linear` is that layer, an `nn.Linear`: call it only to get logits. To share its weight with an
    embedding, assign `loss.linear.weight = embedding.weight`; a model's own last layer may be
    assigned, too. Its parameters are trained, so make this module a part of the model, inside DDP;
    with FSDP2 shard it as a module of its own, `fully_shard(head)`. The state dict is that of
    `torch.nn.LinearCrossEntropyLoss`, which newer versions of torch have.

    Args:
        in_features: The size H of the hidden states.
        num_classes: The number of classes.
        bias: The layer has a bias.
        weight: A factor for the loss of each class, of shape `(num_classes)`, or None; a buffer.
        ignore_index: Rows with this target have loss and gradient 0, and are not counted by a mean.
        reduction: `"mean"`, `"sum"` or `"none"`, as in `cross_entropy`.
        label_smoothing: The part of each target, from 0 to 1, that is spread over all classes.
        scaler: The GradScaler, ampfuse's or torch's, that scales this loss; None if none does. The
            loss then expects the gradient that `scaler.scale(loss).backward()` passes.
        z_loss: Adds `z_loss * lse**2` to each row's loss, as in `cross_entropy`.
        softcap: First replaces logits by `softcap * tanh(logits / softcap)`.
        chunk_rows: Number of rows per chunk, as in `linear_cross_entropy`.
        chunk_classes: Number of classes at a time, as in `linear_cross_entropy`.
        logits_dtype: The dtype in which logits are stored, as in `linear_cross_entropy`.
        device: Device of the layer's parameters; torch's default if None.
        dtype: Dtype of the layer's parameters; torch's default if None.

    Raises:
        TypeError: `scaler` is not a scaler.

    Examples:
        >>> import torch, ampfuse
        >>> criterion = ampfuse.LinearCrossEntropyLoss(8, 100)
        >>> criterion(torch.zeros(4, 8), torch.arange(4)).detach()
        tensor(4.6052)
    """

    weight: Tensor | None
    # Modules that older versions of ampfuse pickled lack these attributes.
    chunk_classes: int | None = None
    logits_dtype: torch.dtype | None = None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        scaler: Any = None,
        z_loss: float = 0.0,
        softcap: float | None = None,
        chunk_rows: int | None = None,
        chunk_classes: int | None = None,
        logits_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(in_features, num_classes, bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.scaler = checked_scaler(scaler)
        self.z_loss = z_loss
        self.softcap = softcap
        self.chunk_rows = chunk_rows
        self.chunk_classes = chunk_classes
        self.logits_dtype = logits_dtype

    extra_repr = changed_options

    def forward(
        self,
        hidden: Tensor,
        target: Tensor,
        denominator: Tensor | float | None = None,
        accumulate_into: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss; errors are those of `linear_cross_entropy`.

        Args:
            hidden: Hidden states of shape `(..., in_features)`.
            target: Classes of shape `(...)`, or probabilities `(..., num_classes)`.
            denominator: Divides the loss with `reduction="mean"`, as in `cross_entropy`.
            accumulate_into: A float32 tensor to which backward adds the weight's gradient in place.

        Returns:
            The loss, as of `linear_cross_entropy`.
        """
        return linear_cross_entropy(
            hidden,
            self.linear.weight,
            target,
            self.linear.bias,
            class_weight=self.weight,
            chunk_rows=self.chunk_rows,
            chunk_classes=self.chunk_classes,
            logits_dtype=self.logits_dtype,
            accumulate_into=accumulate_into,
            **options_of(self, hidden, denominator),
        )
