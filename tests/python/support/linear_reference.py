"""Batches for linear cross-entropy, and its exact results in float64."""

from dataclasses import dataclass, field
from typing import Any

import ampfuse
import torch
from cross_entropy_reference import exact
from torch import Tensor
from torch.nn import functional


@dataclass
class Head:
    """A batch: hidden states, a weight and an optional bias, which require grad, and targets."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def loss(self, **options: Any) -> Any:
        """Return the loss, by default of logits with all their digits."""
        if self.weight.dtype != torch.float64:
            options.setdefault("logits_dtype", torch.float32)
        return ampfuse.linear_cross_entropy(
            self.hidden, self.weight, self.target, self.bias, **options
        )

    def grads(self, loss: Tensor, upstream: Tensor | float = 1.0, **how: Any) -> list[Tensor]:
        if isinstance(upstream, Tensor):
            upstream = upstream.to(loss).expand(loss.shape)
        else:  # rounded to float32; filled on the device, as a copy to a GPU would synchronise
            upstream = torch.full_like(loss, torch.tensor(upstream).item())
        return list(torch.autograd.grad(loss, self.tensors(), upstream, **how))

    def as_leaves(self, dtype: torch.dtype) -> "Head":
        """Return a batch of leaves with the same numbers in another dtype."""
        return Head(*(leaf(t, dtype) for t in (self.hidden, self.weight, self.bias)), self.target)


def leaf(tensor: Tensor | None, dtype: torch.dtype) -> Any:
    return None if tensor is None else tensor.detach().to(dtype).requires_grad_()


def head(
    device: torch.device,
    dtype: torch.dtype,
    rows: int = 21,
    features: int = 24,
    classes: int = 101,
    *,
    bias: bool = True,
    seed: int = 0,
) -> Head:
    """Return a batch whose logits are a few units in size. Every seventh row is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator).to(device, dtype)
        return made.requires_grad_()

    target = torch.randint(classes, (rows,), generator=generator)
    target[3::7] = -100
    weight = (numbers(classes, features).detach() / 3).requires_grad_()
    return Head(
        numbers(rows, features), weight, numbers(classes) if bias else None, target.to(device)
    )


@dataclass
class Exact:
    """Loss and gradients in float64, from the same rounded numbers."""

    loss: Tensor
    grads: list[Tensor] = field(default_factory=list)


def exactly(head: Head, upstream: Tensor | float = 1.0, **options: Any) -> Exact:
    wide = head.as_leaves(torch.float64)
    hidden = wide.hidden.reshape(wide.hidden.shape[:-1].numel(), wide.hidden.shape[-1])
    logits = functional.linear(hidden, wide.weight, wide.bias)
    if "class_weight" in options:
        options["weight"] = options.pop("class_weight")
    target = wide.target
    target = target.reshape(logits.shape) if target.is_floating_point() else target.reshape(-1)
    if isinstance(upstream, Tensor) and upstream.dim() > 0:
        upstream = upstream.reshape(-1)
    loss, grad = exact(logits, target, upstream, **options)
    grads = torch.autograd.grad(logits, wide.tensors(), grad)
    shape = head.hidden.shape[:-1]
    return Exact(loss.reshape(shape) if loss.dim() else loss, list(grads))


def off(result: Tensor, expected: Tensor) -> float:
    """Return the largest error, relative to the largest expected number."""
    if expected.numel() == 0:
        return 0.0
    error = (result.detach().double() - expected).abs().max()
    return (error / expected.abs().max().clamp(min=1e-300)).item()


# Allowed errors of gradients, which are rounded to 16 bits once or twice, and of losses, which are
# added up in float32.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.bfloat16: 8e-3,
    torch.float16: 1e-3,
}
LOSS_TOLERANCE = {torch.float64: 1e-12} | dict.fromkeys(
    (torch.float32, torch.bfloat16, torch.float16), 1e-6
)


def check(head: Head, *, upstream: Tensor | float = 1.0, tolerance: float = 1, **options: Any):
    """Check loss and gradients of a call against the exact ones."""
    how = {
        name: options.pop(name)
        for name in ("chunk_rows", "chunk_classes", "grad_scale")
        if name in options
    }
    expected = exactly(head, upstream, **options)
    loss = head.loss(**how, **options)
    dtype = head.weight.dtype
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        loss.double(),
        expected.loss,
        rtol=LOSS_TOLERANCE[dtype] * tolerance,
        atol=LOSS_TOLERANCE[dtype] * tolerance,
        equal_nan=True,
    )
    for tensor, grad, right in zip(
        head.tensors(), head.grads(loss, upstream), expected.grads, strict=True
    ):
        assert grad.dtype == tensor.dtype
        assert grad.shape == tensor.shape
        assert off(grad, right) <= TOLERANCE[dtype] * tolerance
