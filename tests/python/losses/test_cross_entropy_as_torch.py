"""Tests of cross_entropy.as_torch, a replacement of torch's function with second derivatives."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
EVERY_REDUCTION = pytest.mark.parametrize("reduction", REDUCTIONS)
SHAPES = {"rows": (6, 11), "one row": (11,), "images": (2, 11, 3, 2)}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def batch(device, dtype, shape=(6, 11)):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    target_shape = shape[:1] * (len(shape) > 1) + shape[2:]
    target = torch.randint(11, target_shape, generator=generator)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return logits, target.to(device)


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


@EVERY_DTYPE
@EVERY_REDUCTION
@EVERY_SHAPE
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_first_and_second_derivatives_equal_torchs(device, dtype, reduction, shape, smoothing):
    logits, target = batch(device, dtype, shape)
    weight = torch.linspace(0.5, 1.5, 11, device=device, dtype=torch.float64)
    wide = logits.detach().double().requires_grad_()
    expected = twice(
        functional.cross_entropy(
            wide, target, weight, reduction=reduction, label_smoothing=smoothing
        ),
        wide,
    )
    mine = weight.to(torch.promote_types(dtype, torch.float32))
    loss = as_torch(logits, target, mine, reduction, smoothing)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
    for result, right in zip(twice(loss, logits), expected, strict=True):
        assert result.dtype == dtype
        error = (result.double() - right).abs().max() / right.abs().max()
        assert error <= tolerance


@EVERY_REDUCTION
def test_second_derivatives_for_probability_targets_equal_torchs(device, reduction):
    logits, _ = batch(device, torch.float64)
    target = torch.rand(6, 11, device=device, dtype=torch.float64).softmax(1)
    expected = twice(functional.cross_entropy(logits, target, reduction=reduction), logits)
    result = twice(as_torch(logits, target, reduction=reduction), logits)
    for grad, right in zip(result, expected, strict=True):
        torch.testing.assert_close(grad, right, rtol=1e-12, atol=1e-14)


def test_second_derivatives_pass_gradgradcheck():
    logits, target = batch(torch.device("cpu"), torch.float64)
    for reduction in REDUCTIONS:
        assert torch.autograd.gradgradcheck(
            lambda x, how=reduction: as_torch(x, target, reduction=how), logits
        )


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.uint8])
def test_second_derivatives_for_int32_and_uint8_targets_equal_torchs(device, index_dtype):
    logits, target = batch(device, torch.float64)
    target = target.clamp(min=0)
    expected = twice(functional.cross_entropy(logits, target), logits)
    result = twice(as_torch(logits, target.to(index_dtype)), logits)
    for grad, right in zip(result, expected, strict=True):
        torch.testing.assert_close(grad, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overwriting_the_logits_prevents_only_second_derivatives(device, dtype):
    leaf, target = batch(device, dtype)
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
    leaf, target = batch(device, torch.float32)
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
    leaf, target = batch(device, torch.float32)

    def loss_of(leaf):
        return as_torch(leaf * 2, target)

    loss = checkpoint(loss_of, leaf, use_reentrant=use_reentrant)
    (grad,) = torch.autograd.grad(loss, leaf) if not use_reentrant else (backward(loss, leaf),)
    wide = leaf.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(functional.cross_entropy(wide * 2, target), wide)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-6)


def backward(loss, leaf):
    loss.backward()
    return leaf.grad


def test_saved_tensor_hooks_receive_the_logits(device):
    """Hooks, for example of a checkpoint, can only release tensors that they receive."""
    leaf, target = batch(device, torch.float32)
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
    logits, target = batch(device, torch.float32)
    compiled = torch.compile(as_torch, fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(logits, target), logits)
    (expected,) = torch.autograd.grad(functional.cross_entropy(logits, target), logits)
    torch.testing.assert_close(grad, expected)


def test_targets_that_require_grad_are_refused(device):
    logits, _ = batch(device, torch.float32)
    target = torch.rand(6, 11, device=device, requires_grad=True)
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
