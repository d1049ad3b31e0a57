"""Causal language models of Hugging Face Transformers, trained without all logits in memory.

A model keeps its own forward. While it trains with labels, its output layer returns
`DeferredLogits`, which its loss function turns into a loss with `linear_cross_entropy`. All else,
such as caches, scaled logits and losses of experts' routers, is computed by the model itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ampfuse.integrations._deferred_logits import DeferredLogits, Head
from ampfuse.losses.options import checked_scaler

M = TypeVar("M")  # a PreTrainedModel or a PeftModel


def apply_to_model(model: M, *, scaler: Any = None) -> M:
    """Make a causal language model of Transformers compute its training loss without the logits.

    In training mode, a call with `labels` returns the same loss, up to rounding, and outputs of the
    same type whose `logits` are None. `num_items_in_batch`, `shift_labels` and `ignore_index` mean
    what they mean in Transformers. Calls without labels and calls in eval mode are as before.

    Call this before other wrappers: DDP, `torch.compile`, `accelerator.prepare`. With FSDP2 the
    output layer must belong to the `fully_shard` group of the whole model.

    The output layer must be a plain `nn.Linear`: adapters on it and quantised weights are refused.
    So are encoder-decoder models and models with a loss of their own. A model that does more with
    its logits than to scale or soft-cap them raises in the first training step.

    Args:
        model: The model, which is changed in place. It may be a PeftModel, or become one later.
        scaler: The GradScaler, ours or torch's, that scales the loss; None if none does. As in
            `LinearCrossEntropyLoss`, the loss then expects the gradient that
            `scaler.scale(loss).backward()` passes. A second call replaces the scaler.

    Returns:
        The model.

    Raises:
        TypeError: The model is of another kind, is wrapped already, or has another output layer.
    """
    inner: Any = model
    if hasattr(type(inner), "get_base_model"):  # PEFT's
        inner = inner.get_base_model()
    loss = _checked_loss(inner)
    if isinstance(loss, _Loss):
        loss.scaler = checked_scaler(scaler)
        return model
    fused = _fused_class(inner.__class__)
    _heads(inner)
    inner.loss_function = _Loss(loss, checked_scaler(scaler))
    inner.__class__ = fused
    return model


class _Loss:
    """A model's loss function for logits, and the same loss for deferred logits."""

    def __init__(self, of_logits: Callable[..., Tensor], scaler: Any) -> None:
        self.of_logits = of_logits
        self.scaler = scaler

    def __call__(self, logits: Any, labels: Any, vocab_size: int, **kwargs: Any) -> Tensor:
        if isinstance(logits, DeferredLogits):
            return logits.causal_loss(labels, vocab_size, self.scaler, **kwargs)
        return self.of_logits(logits=logits, labels=labels, vocab_size=vocab_size, **kwargs)


def _checked_loss(model: Any) -> Any:
    name, loss = type(model).__name__, getattr(model, "loss_function", None)
    if isinstance(loss, _Loss):
        return loss
    if "forward" in vars(model):
        raise TypeError(
            f"model: the forward of this {name} was replaced, for example by accelerator.prepare() "
            "or SFTTrainer; call apply_to_model before"
        )
    is_causal = (
        hasattr(type(model), "get_output_embeddings")
        and model.get_output_embeddings() is not None
        and not model.config.is_encoder_decoder
        and "labels" in inspect.signature(type(model).forward).parameters
        and getattr(loss, "__name__", "") == "ForCausalLMLoss"
    )
    if not is_causal:
        raise TypeError(
            "model: expected a decoder of Transformers, or a PeftModel of one, with an output "
            f"layer, labels and the loss ForCausalLMLoss, got {name} with the loss {loss}; call "
            "apply_to_model before DDP, torch.compile and other wrappers"
        )
    return loss


def _heads(model: Any) -> list[Head]:
    """Return the output layer, or those that PEFT's modules_to_save chooses from, as Heads.

    They are checked before each use, because PEFT and `resize_token_embeddings` replace them.
    """
    layer = model.get_output_embeddings()
    layers: list[Any] = [layer]
    if hasattr(layer, "modules_to_save"):
        layers = [layer.original_module, *layer.modules_to_save.values()]
    for layer in layers:
        kind = type(layer)
        if issubclass(kind, Head):
            continue
        if kind is not torch.nn.Linear:
            raise TypeError(
                f"model: expected an output layer that is a plain nn.Linear, got {kind}. Adapters, "
                "quantised weights and a fully_shard group of the output layer are not supported"
            )
        if "forward" in vars(layer):
            raise TypeError(
                "model: the forward of the output layer was replaced. A device map of several "
                "devices and Transformers' tensor parallelism are not supported"
            )
        layer.__class__ = Head
        layer.deferred = False
    return layers


@functools.cache
def _fused_class(base: Any) -> Any:
    """Return a subclass of a model's class, with the same name and the changed forward."""
    if getattr(base.forward, "is_fused", False):
        return base
    signature = inspect.signature(base.forward)
    position = list(signature.parameters).index("labels") - 1  # without self

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        is_ours = isinstance(self.loss_function, _Loss)  # not in a new object of this class
        if not (self.training and is_ours) or labels is None:
            return base.forward(self, *args, **kwargs)
        heads = _heads(self)
        for head in heads:
            head.deferred = True
        try:
            output = base.forward(self, *args, **kwargs)
        finally:
            for head in heads:
                head.deferred = False
        return _drop_logits(output)

    # Accelerate unwraps forwards as far as they have __wrapped__, and would drop this one.
    del forward.__wrapped__
    forward.__signature__ = signature  # type: ignore[attr-defined]

    def reduce(self: Any, protocol: Any) -> Any:
        return _empty, (base,), self.__dict__

    names = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    forward.is_fused = True  # type: ignore[attr-defined]
    changes = {"forward": forward, "__reduce_ex__": reduce}
    return type(base.__name__, (base,), names | changes)


def _empty(base: Any) -> Any:
    """Return a model without attributes, which copy and pickle set afterwards."""
    fused = _fused_class(base)
    return fused.__new__(fused)


def _drop_logits(output: Any) -> Any:
    """Return a model's outputs with None instead of logits."""
    parts = output if isinstance(output, tuple) else output.values()
    if not any(isinstance(part, DeferredLogits) for part in parts):
        raise TypeError(
            "apply_to_model: this model does not call its output layer, or does not return the "
            "logits, so its loss cannot be computed without them"
        )
    if isinstance(output, tuple):
        return tuple(None if isinstance(part, DeferredLogits) else part for part in output)
    kept = {k: v for k, v in output.items() if not isinstance(v, DeferredLogits)}
    return type(output)(**kept)
