"""Tests of cross_entropy.as_torch, a replacement of torch's function with second derivatives."""

import pytest
import torch
from cross_entropy_samples import batch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
ROWS = (6, 11)


def ignoring_one(device, dtype=torch.float32, shape=ROWS):
    """Return logits, and targets of which one is ignored unless it is the only one."""
    logits, target = batch(device, shape, dtype)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return logits, target


def as_torch(logits, target, weight=None, reduction="mean", smoothing=0.0, ignore=-100):
    return torch.ops.ampfuse.cross_entropy.as_torch(
        logits, target, weight, REDUCTIONS[reduction], ignore, smoothing
    )


def twice(loss, logits):
    """Return the gradient of the loss, and the gradient of that gradient's squared norm.

    The elements of `loss` get different upstream gradients.
    """
    upstream = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device, dtype=loss.dtype)
    (grad,) = torch.autograd.grad(
        loss, logits, upstream.reshape(loss.shape), create_graph=True, retain_graph=True
    )
    (again,) = torch.autograd.grad(grad.double().square().sum(), logits)
    return grad, again


# Rows in each dtype; one row; positions that are read in place, and few positions, which are not.
CASES = [
    *((dtype, ROWS) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)),
    (torch.float64, (11,)),
    *((torch.bfloat16, (2, 11, 4, 5)), (torch.float64, (2, 11, 4, 5))),
    (torch.float64, (2, 11, 3, 2)),
]


@pytest.mark.parametrize(("dtype", "shape"), CASES, ids=str)
def test_first_and_second_derivatives_equal_torchs(device, dtype, shape):
    logits, target = ignoring_one(device, dtype, shape)
    weight = torch.linspace(0.5, 1.5, 11, device=device, dtype=torch.float64)
    mine = weight.to(torch.promote_types(dtype, torch.float32))
    wide = logits.detach().double().requires_grad_()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for reduction in REDUCTIONS:
        for smoothing in (0.0, 0.1):
            options = {"reduction": reduction, "label_smoothing": smoothing}
            expected = twice(functional.cross_entropy(wide, target, weight, **options), wide)
            found = twice(as_torch(logits, target, mine, reduction, smoothing), logits)
            for result, right in zip(found, expected, strict=True):
                assert result.dtype == dtype
                error = (result.double() - right).abs().max() / right.abs().max()
                assert error <= tolerance, options


def test_second_derivatives_for_other_kinds_of_targets_equal_torchs(device):
    """Probabilities, and indices that are not int64."""
    logits, target = batch(device, ROWS, torch.float64)
    probabilities = torch.rand(ROWS, device=device, dtype=torch.float64).softmax(1)
    for given in (probabilities, target.to(torch.int32), target.to(torch.uint8)):
        torchs = given if given.is_floating_point() else target
        for reduction in REDUCTIONS:
            found = twice(as_torch(logits, given, reduction=reduction), logits)
            expected = twice(functional.cross_entropy(logits, torchs, reduction=reduction), logits)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwriting_the_logits_prevents_only_second_derivatives(device, dtype):
    leaf, target = ignoring_one(device, dtype)
    logits = leaf * 1
    loss = as_torch(logits, target)
    expected = torch.autograd.grad(functional.cross_entropy(leaf.double(), target), leaf)[0]
    with torch.no_grad():
        logits.zero_()
    (grad,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    torch.testing.assert_close(grad, expected, rtol=2e-2, atol=1e-3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, leaf, create_graph=True)


def test_backward_releases_the_logits_unless_the_graph_is_kept(device):
    leaf, target = ignoring_one(device)
    logits = leaf * 1
    storage = logits.untyped_storage()
    loss = as_torch(logits, target)
    del logits

    def users():
        return torch._C._storage_Use_Count(storage._cdata)

    kept = users()
    loss.backward(retain_graph=True)
    assert users() == kept
    loss.backward()
    assert users() == kept - 1
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_inside_a_checkpoint_equals_torchs(device, use_reentrant):
    leaf, target = ignoring_one(device)
    checkpoint(lambda x: as_torch(x * 2, target), leaf, use_reentrant=use_reentrant).backward()
    wide = leaf.detach().double().requires_grad_()
    functional.cross_entropy(wide * 2, target).backward()
    torch.testing.assert_close(leaf.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)


def test_saved_tensor_hooks_receive_the_logits(device):
    """Hooks, for example of a checkpoint, can only release tensors that they receive."""
    leaf, target = ignoring_one(device)
    logits = leaf * 1
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        loss = as_torch(logits, target)
    assert any(tensor.data_ptr() == logits.data_ptr() for tensor in saved)
    _, again = twice(loss, leaf)
    expected = twice(functional.cross_entropy(leaf, target), leaf)[1]
    torch.testing.assert_close(again, expected)


def test_gradient_of_a_fully_compiled_call_equals_torchs(device):
    torch._dynamo.reset()
    logits, target = ignoring_one(device)
    compiled = torch.compile(as_torch, fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(logits, target), logits)
    (expected,) = torch.autograd.grad(functional.cross_entropy(logits, target), logits)
    torch.testing.assert_close(grad, expected)


def test_targets_that_require_grad_are_refused(device):
    logits, _ = ignoring_one(device)
    target = torch.rand(ROWS, device=device, requires_grad=True)
    with pytest.raises(
        ValueError, match="target: gradients with respect to probabilities are not supported"
    ):
        as_torch(logits, target)


def test_second_derivative_of_an_empty_batch_of_positions():
    logits = torch.empty(0, 4, 32, requires_grad=True)
    loss = as_torch(logits, torch.empty(0, 32, dtype=torch.long), reduction="sum")
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), logits)
    assert second.shape == logits.shape
