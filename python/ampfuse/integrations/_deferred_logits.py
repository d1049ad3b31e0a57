"""Logits that are not computed, and the output layer that returns them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from ampfuse.losses import linear_cross_entropy
from ampfuse.losses.options import grad_scale_of


class DeferredLogits:
    """The arguments of `linear_cross_entropy`, which replace a language model's logits.

    The logits are `scale * head(hidden)`, or `cap * tanh(scale * head(hidden))` with a cap. They
    can be multiplied and divided by numbers, and passed to `tanh` once. This is all that models do
    with logits before their loss; anything else raises.
    """

    def __init__(
        self, hidden: Tensor, head: torch.nn.Linear, scale: float = 1.0, cap: float | None = None
    ) -> None:
        self.hidden = hidden
        self.head = head
        self.scale = scale
        self.cap = cap

    def float(self) -> DeferredLogits:  # losses are float32 anyway
        return self

    def contiguous(self) -> DeferredLogits:
        return self

    def __mul__(self, factor: Any) -> DeferredLogits:
        if not isinstance(factor, (int, float)):
            _refuse("multiplies them by something else than a number")
        if self.cap is None:
            return DeferredLogits(self.hidden, self.head, self.scale * factor)
        return DeferredLogits(self.hidden, self.head, self.scale, self.cap * factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> DeferredLogits:
        if not isinstance(divisor, (int, float)) or divisor == 0:
            _refuse("divides them by something else than a number other than 0")
        return self.__mul__(1 / divisor)

    def tanh(self) -> DeferredLogits:
        if self.cap is not None:
            _refuse("applies tanh twice")
        return DeferredLogits(self.hidden, self.head, self.scale, cap=1.0)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.tanh and args:
            return args[0].tanh()
        _refuse(f"calls {getattr(function, '__name__', function)}")

    def __getitem__(self, index: Any) -> NoReturn:
        _refuse("indexes them")

    def __getattr__(self, name: str) -> NoReturn:
        _refuse(f"reads .{name}", AttributeError)

    def causal_loss(
        self,
        labels: Tensor,
        vocab_size: int,
        scaler: Any,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **unused: Any,
    ) -> Tensor:
        """Return what Transformers' ForCausalLMLoss returns for the logits and these arguments."""
        hidden, weight = self.hidden, self.head.weight
        bias: Tensor | None = self.head.bias
        if weight.shape[0] != vocab_size:
            raise ValueError(
                f"output layer: expected a weight with {vocab_size} rows, got {weight.shape[0]}. "
                "Weights sharded by tensor parallelism or DeepSpeed ZeRO-3 are not supported"
            )
        if shift_labels is None:
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(hidden.device)
        # linear_cross_entropy's softcap is cap * tanh(logits / cap). The scale of a plain softcap,
        # 1 / cap, gives 1 up to the rounding of the division.
        scale = self.scale if self.cap is None else self.scale * self.cap
        if round(scale, 12) != 1:
            hidden = hidden * scale
            bias = None if bias is None else bias * scale
        return linear_cross_entropy(
            hidden,
            weight,
            shift_labels.to(hidden.device).reshape(hidden.shape[:-1]),
            bias,
            ignore_index=ignore_index,
            grad_scale=grad_scale_of(scaler, hidden),
            denominator=num_items_in_batch,
            softcap=self.cap,
        )


def _refuse(what: str, error: type[Exception] = TypeError) -> NoReturn:
    raise error(
        f"apply_to_model: while it computes the loss from the logits, this model {what}. Only "
        "models whose loss is cross-entropy of scaled or soft-capped logits are supported"
    )


class Head(torch.nn.Linear):
    """An output layer that returns deferred logits while `deferred` is True."""

    deferred: bool

    def forward(self, input: Tensor) -> Any:
        """Return logits, or what is needed to compute them."""
        return DeferredLogits(input, self) if self.deferred else super().forward(input)
