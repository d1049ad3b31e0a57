"""Batches for linear cross-entropy, and its exact results in float64."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import ampfuse
import pytest
import torch
from cross_entropy_reference import exact
from torch import Tensor
from torch.nn import functional

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
REDUCTIONS = ["mean", "sum", "none"]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
EVERY_REDUCTION = pytest.mark.parametrize("reduction", REDUCTIONS)
# Each reduction, by chunks of rows, or by tiles of classes, which reduction none does not have.
WAYS = {
    "mean": {"reduction": "mean", "chunk_rows": 8},
    "sum": {"reduction": "sum", "chunk_rows": 8},
    "none": {"reduction": "none", "chunk_rows": 8},
    "mean by tiles": {"reduction": "mean", "chunk_classes": 32},
    "sum by tiles": {"reduction": "sum", "chunk_classes": 32},
}
EVERY_WAY = pytest.mark.parametrize("how", WAYS.values(), ids=list(WAYS))

# Options of the loss, for with_options().
OPTIONS = {
    "plain": {},
    "class weights": {"class_weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "smoothing and weights": {"label_smoothing": 0.3, "class_weight": True},
    "z-loss": {"z_loss": 1e-3},
    "softcap": {"softcap": 3.0},
    "ignored class": {"ignore_index": 5},
    "probabilities": {"probabilities": True},
    "smooth probabilities": {"probabilities": True, "label_smoothing": 0.2, "class_weight": True},
    "all": {"class_weight": True, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 4.0},
}


@dataclass
class Head:
    """A batch: hidden states, a weight and an optional bias, which require grad, and targets."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor

    def tensors(self):
        return [t for t in (self.hidden, self.weight, self.bias) if t is not None]

    def loss(self, **options):
        """Return the loss, by default of logits with all their digits."""
        if self.weight.dtype != torch.float64:
            options.setdefault("logits_dtype", torch.float32)
        tensors = self.hidden, self.weight, self.target, self.bias
        return ampfuse.linear_cross_entropy(*tensors, **options)

    def grads(self, loss, upstream=1.0, **how):
        if isinstance(upstream, Tensor):
            upstream = upstream.to(loss).expand(loss.shape)
        else:  # rounded to float32; filled on the device, as a copy to a GPU would synchronise
            upstream = torch.full_like(loss, torch.tensor(upstream).item())
        return list(torch.autograd.grad(loss, self.tensors(), upstream, **how))

    def as_leaves(self, dtype):
        """Return a batch of leaves with the same numbers in another dtype."""
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in self.tensors()]
        hidden, weight, bias = leaves if len(leaves) == 3 else (*leaves, None)
        return Head(hidden, weight, bias, self.target)

    def product_in_float64(self):
        """Return the logits of all rows in float64, and the leaves from which they come."""
        wide = self.as_leaves(torch.float64)
        rows, features = wide.hidden.shape[:-1].numel(), wide.hidden.shape[-1]
        hidden = wide.hidden.reshape(rows, features)
        return functional.linear(hidden, wide.weight, wide.bias), wide.tensors()

    def exact_logits(self):
        return self.product_in_float64()[0].detach()


def head(device, dtype, rows=21, features=24, classes=101, *, bias=True, seed=0):
    """Return a batch whose logits are a few units in size. Every seventh row is ignored."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        made = torch.randn(*shape, generator=generator).to(device, dtype)
        return made.requires_grad_()

    target = torch.randint(classes, (rows,), generator=generator)
    target[3::7] = -100
    weight = (numbers(classes, features).detach() / 3).requires_grad_()
    hidden, bias = numbers(rows, features), numbers(classes) if bias else None
    return Head(hidden, weight, bias, target.to(device))


def with_options(batch, name):
    """Return the batch with targets for some of OPTIONS, and the options of the call."""
    options = dict(OPTIONS[name])
    rows, classes = len(batch.target), len(batch.weight)
    generator = torch.Generator().manual_seed(3)
    if options.pop("class_weight", False):
        options["class_weight"] = torch.rand(classes, generator=generator).to(batch.target.device)
    target = batch.target
    if options.pop("probabilities", False):
        target = torch.randn(rows, classes, generator=generator).softmax(1).to(target.device)
    if "ignore_index" in options:
        target = target.clamp(min=0)
        target[::4] = options["ignore_index"]
    return replace(batch, target=target), options


class Exact(NamedTuple):
    """Loss and gradients in float64, from the same rounded numbers."""

    loss: Tensor
    grads: list[Tensor]


def exactly(head, upstream=1.0, *, logits=None, **options):
    """Return the exact results, by default from the exact logits."""
    product, tensors = head.product_in_float64()
    logits = product if logits is None else logits.double()
    if "class_weight" in options:
        options["weight"] = options.pop("class_weight")
    target = head.target
    target = target.reshape(logits.shape) if target.is_floating_point() else target.reshape(-1)
    if isinstance(upstream, Tensor) and upstream.dim() > 0:
        upstream = upstream.reshape(-1)
    loss, grad = exact(logits, target, upstream, **options)
    grads = torch.autograd.grad(product, tensors, grad)
    return Exact(loss.reshape(head.hidden.shape[:-1]) if loss.dim() else loss, list(grads))


def off(result, expected):
    """Return the largest error, relative to the largest expected number."""
    if expected.numel() == 0:
        return 0.0
    error = (result.detach().double() - expected).abs().max()
    return (error / expected.abs().max().clamp(min=1e-300)).item()


# Allowed errors of gradients, which are rounded to 16 bits once or twice, and of losses, which are
# added up in float32.
TOLERANCE = dict(zip(DTYPES, (1e-12, 2e-6, 8e-3, 1e-3), strict=True))
LOSS_TOLERANCE = dict(zip(DTYPES, (1e-12, 1e-6, 1e-6, 1e-6), strict=True))


def check_grads(grads, expected, allowed, case=""):
    """Check gradients against the exact ones. `allowed` is the largest error."""
    for number, (grad, right) in enumerate(zip(grads, expected, strict=True)):
        error = off(grad, right)
        assert grad.shape == right.shape, f"{case}: gradient {number}"
        assert error <= allowed, f"{case}: gradient {number} is off by {error}"


def check_results(head, loss, grads, expected, tolerance=1, case="loss"):
    """Check loss and gradients against the exact ones. `tolerance` is a factor for gradients."""
    dtype = head.weight.dtype
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32), case
    allowed = {"rtol": LOSS_TOLERANCE[dtype], "atol": LOSS_TOLERANCE[dtype], "equal_nan": True}
    torch.testing.assert_close(
        loss.double(), expected.loss, msg=lambda message: f"{case}: {message}", **allowed
    )
    assert [grad.dtype for grad in grads] == [tensor.dtype for tensor in head.tensors()], case
    check_grads(grads, expected.grads, TOLERANCE[dtype] * tolerance, case)


def check(head, *, upstream=1.0, tolerance=1, **options):
    """Check loss and gradients of a call against the exact ones."""
    texts = {k: "a tensor" if isinstance(v, Tensor) else v for k, v in options.items()}
    shapes = f"{list(head.hidden.shape)} times {list(head.weight.shape)}"
    loss = head.loss(**options)
    grads = head.grads(loss, upstream)
    for name in ("chunk_rows", "chunk_classes", "grad_scale"):
        options.pop(name, None)
    expected = exactly(head, upstream, **options)
    check_results(head, loss, grads, expected, tolerance, f"{head.weight.dtype}, {shapes}, {texts}")
