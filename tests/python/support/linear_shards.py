"""A batch of linear cross-entropy whose classes are sharded over two ranks."""

import torch
import torch.distributed as dist
from linear_reference import LOSS_TOLERANCE, TOLERANCE, Head, exactly, head, off

ROWS = 21


def whole_head(dtype, classes, options):
    """Return the batch with all classes, and the options of a call on one rank."""
    batch = head(torch.device("cpu"), dtype, rows=ROWS, classes=classes)
    options = dict(options)
    generator = torch.Generator().manual_seed(3)
    if options.pop("class_weight", False):
        options["class_weight"] = torch.rand(classes, generator=generator)
    if options.pop("probabilities", False):
        batch.target = torch.randn(ROWS, classes, generator=generator).softmax(1)
    if "ignore_index" in options:
        batch.target.clamp_(min=0)
        batch.target[::4] = 5
    return batch, options


def shard_of(batch, first, last):
    """Return the batch with the classes from `first` up to, not including, `last`."""
    weight, bias = (
        None if whole is None else whole.detach()[first:last].clone().requires_grad_()
        for whole in (batch.weight, batch.bias)
    )
    is_index = not batch.target.is_floating_point()
    target = batch.target if is_index else batch.target[:, first:last]
    return Head(batch.hidden.detach().requires_grad_(), weight, bias, target)


def my_shard(batch, even=True):
    """Return this rank's shard, and the arguments that describe it."""
    classes = batch.weight.shape[0]
    middle = classes // 2 if even else classes // 3
    first, last = (0, middle) if dist.get_rank() == 0 else (middle, classes)
    how = {"process_group": dist.group.WORLD}
    if not even:
        how |= {"first_class": first, "num_classes": classes}
    return shard_of(batch, first, last), how


def upstream_of(reduction):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, generator=generator) if reduction == "none" else torch.tensor(0.5)


def result_of(mine, loss, reduction="mean", **more):
    hidden, *of_classes = mine.grads(loss, upstream_of(reduction))
    return {"loss": loss.detach(), "hidden": hidden, "of_classes": of_classes} | more


def joined(results):
    """Return the loss and the gradients of all classes.

    The ranks must agree in the loss and in the gradient of the hidden states.
    """
    one, other = results
    assert torch.equal(one["loss"], other["loss"])
    assert torch.equal(one["hidden"], other["hidden"])
    of_classes = [
        torch.cat(pair) for pair in zip(one["of_classes"], other["of_classes"], strict=True)
    ]
    return one["loss"], [one["hidden"], *of_classes]


def check_joined(results, batch, reduction="mean", **options):
    loss, grads = joined(results)
    expected = exactly(batch, upstream_of(reduction), reduction=reduction, **options)
    dtype = batch.weight.dtype
    tolerance = LOSS_TOLERANCE[dtype]
    torch.testing.assert_close(
        loss.double(), expected.loss, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    for tensor, grad, right in zip(batch.tensors(), grads, expected.grads, strict=True):
        assert grad.dtype == tensor.dtype
        # In products that add up thousands of numbers, torch's own errors are as large.
        allowed = 2 if batch.weight.shape[0] > 5000 else 1
        assert off(grad, right) <= TOLERANCE[dtype] * allowed
