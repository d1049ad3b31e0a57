"""Tests of return_metrics: every shape and dtype, ignored rows and extreme rows."""

import math

import ampfuse
import pytest
import torch
from torch.nn import functional


def batch(device, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * 3).to(device, dtype).requires_grad_()
    index_shape = shape[:1] + shape[2:] if len(shape) > 1 else ()
    classes = shape[min(1, len(shape) - 1)]
    return logits, torch.randint(classes, index_shape, generator=generator).to(device)


def expected_of(logits):
    """Return lse, entropy and argmax, computed in float64."""
    x = logits.detach().double()
    classes = min(1, x.dim() - 1)
    log_p = x.log_softmax(classes)
    entropy = -(log_p.exp() * log_p).sum(classes)
    return x.logsumexp(classes), entropy, x.argmax(classes)


SHAPES = [(7,), (6, 50), (6, 5000), (2, 5, 3), (2, 5, 3, 4), (0, 5), (2, 5, 0)]
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


@pytest.mark.sanitizer
@EVERY_SHAPE
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_metrics_for_index_targets_are_exact(device, shape, dtype):
    logits, target = batch(device, shape, dtype)
    target.view(-1)[::3] = -100

    loss, metrics = ampfuse.cross_entropy(logits, target, return_metrics=True)

    lse, entropy, argmax = expected_of(logits)
    of_loss = torch.promote_types(dtype, torch.float32)
    assert metrics.lse.dtype == metrics.entropy.dtype == loss.dtype == of_loss
    torch.testing.assert_close(metrics.lse.double(), lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(metrics.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics.argmax, argmax)
    torch.testing.assert_close(metrics.correct, (argmax == target) & (target != -100))
    plain = ampfuse.cross_entropy(logits, target)
    torch.testing.assert_close(loss, plain, rtol=0, atol=0, equal_nan=True)


@EVERY_SHAPE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_metrics_for_probability_targets_are_exact(device, shape, dtype):
    logits, _ = batch(device, shape, dtype)
    target = torch.rand(shape, device=device).to(dtype)

    _, metrics = ampfuse.cross_entropy(logits, target, return_metrics=True)

    lse, entropy, argmax = expected_of(logits)
    torch.testing.assert_close(metrics.lse.double(), lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(metrics.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(metrics.argmax, argmax)
    torch.testing.assert_close(metrics.correct, argmax == target.argmax(min(1, len(shape) - 1)))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradient_has_the_same_bits_with_and_without_metrics(device, reduction, dtype):
    """The gradient comes from forward or from backward, and the loss has one or many elements."""
    logits, target = batch(device, (2, 50, 3, 4), dtype)
    target[0, 1] = -100
    grads = []
    for return_metrics in (False, True):
        loss = ampfuse.cross_entropy(
            logits, target, reduction=reduction, return_metrics=return_metrics
        )
        loss = loss[0] if return_metrics else loss
        grads.append(torch.autograd.grad(loss.sum(), logits)[0])
    assert torch.equal(*grads)


def test_metrics_do_not_require_grad(device):
    logits, target = batch(device, (2, 5, 3))
    _, metrics = ampfuse.cross_entropy(logits, target, return_metrics=True)
    assert [x.requires_grad for x in metrics] == [False] * 4


def test_metrics_are_computed_from_soft_capped_logits(device):
    """Soft-capped logits have the same order as the logits, and so the same argmax."""
    logits, target = batch(device, (6, 50))
    _, metrics = ampfuse.cross_entropy(logits, target, softcap=2.0, return_metrics=True)
    capped = 2.0 * torch.tanh(logits.detach().double() / 2.0)
    lse, entropy, _ = expected_of(capped)
    torch.testing.assert_close(metrics.lse.double(), lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(metrics.entropy.double(), entropy, rtol=1e-5, atol=1e-6)
    assert torch.equal(metrics.argmax, logits.argmax(1))


def test_metrics_do_not_depend_on_weights_smoothing_and_z_loss(device):
    logits, target = batch(device, (6, 50))
    weight = torch.rand(50, device=device)
    plain = ampfuse.cross_entropy(logits, target, return_metrics=True)[1]
    other = ampfuse.cross_entropy(
        logits, target, weight, label_smoothing=0.3, z_loss=0.1, return_metrics=True
    )[1]
    for a, b in zip(plain, other, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("classes", [7, 5000])
def test_argmax_is_the_first_of_equal_logits(device, classes):
    logits = torch.zeros(3, classes, device=device)
    logits[1, classes // 2 :] = 1
    logits[2, classes - 1] = 1
    target = torch.tensor([0, classes // 2, classes - 1], device=device)
    _, metrics = ampfuse.cross_entropy(logits, target, return_metrics=True)
    assert metrics.argmax.tolist() == target.tolist()
    assert metrics.correct.all()


@pytest.mark.parametrize("classes", [4, 5000])
def test_metrics_of_certain_uniform_infinite_and_nan_rows_are_exact(device, classes):
    """The rows are certain of one class, uniform, -inf except for one class, and NaN."""
    logits = torch.zeros(4, classes, device=device)
    logits[0, 3] = 500
    logits[2, 1:] = -math.inf
    logits[3, 2] = math.nan
    target = torch.tensor([3, 0, 0, 2], device=device)

    _, metrics = ampfuse.cross_entropy(logits, target, reduction="none", return_metrics=True)

    lse = torch.tensor([500, math.log(classes), 0, math.nan])
    entropy = torch.tensor([0, math.log(classes), 0, math.nan])
    torch.testing.assert_close(metrics.lse.cpu(), lse, equal_nan=True)
    torch.testing.assert_close(metrics.entropy.cpu(), entropy, equal_nan=True)
    assert torch.equal(metrics.argmax, logits.argmax(1))
    assert metrics.argmax.tolist() == [3, 0, 0, 2]


@pytest.mark.parametrize("ignore_index", [-100, 50, 7])
def test_metrics_of_ignored_rows_are_reported_but_never_correct(device, ignore_index):
    logits, target = batch(device, (6, 50))
    logits.data[2, 7] = 9.0
    target[:] = logits.argmax(1)
    expected = ampfuse.cross_entropy(logits, target, return_metrics=True)[1]
    assert expected.correct.all()

    target[2] = ignore_index
    _, metrics = ampfuse.cross_entropy(
        logits, target, ignore_index=ignore_index, return_metrics=True
    )

    assert metrics.correct.tolist() == [True, True, False, True, True, True]
    assert torch.equal(metrics.argmax, expected.argmax)
    torch.testing.assert_close(metrics.lse, expected.lse)
    torch.testing.assert_close(metrics.entropy, expected.entropy)


def test_metrics_in_a_compiled_function_equal_eager_ones(device):
    logits, target = batch(device, (6, 50))

    def of(logits, target):
        return ampfuse.cross_entropy(logits * 2, target, return_metrics=True)

    torch._dynamo.reset()
    loss, metrics = torch.compile(of, fullgraph=True, backend="aot_eager")(logits, target)
    torch.testing.assert_close(loss, functional.cross_entropy(logits * 2, target))
    for found, expected in zip(metrics, of(logits, target)[1], strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_target_of_a_narrow_dtype_is_not_mistaken_for_ignore_index(device, dtype):
    # Cast to a byte -100 is 156, and cut to 32 bits 2³² + 7 is 7.
    for index, ignored in ((156, -100), (7, 2**32 + 7)):
        logits = torch.zeros(1, 200, device=device)
        logits[0, index] = 1
        target = torch.tensor([index], dtype=dtype, device=device)
        _, metrics = ampfuse.cross_entropy(
            logits, target, ignore_index=ignored, return_metrics=True
        )
        assert metrics.correct.tolist() == [True]
