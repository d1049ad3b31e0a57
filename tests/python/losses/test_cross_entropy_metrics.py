"""Tests of return_metrics: every shape and dtype, ignored rows and extreme rows."""

import math

import ampfuse
import pytest
import torch
from cross_entropy_reference import results
from cross_entropy_samples import batch
from torch.nn import functional


def expected_of(logits):
    """Return lse, entropy and argmax, computed in float64."""
    x = logits.detach().double()
    classes = min(1, x.dim() - 1)
    log_p = x.log_softmax(classes)
    entropy = -(log_p.exp() * log_p).sum(classes)
    return x.logsumexp(classes), entropy, x.argmax(classes)


def metrics_of(*arguments, **options):
    return ampfuse.cross_entropy(*arguments, return_metrics=True, **options)[1]


def assert_metrics(metrics, lse, entropy):
    torch.testing.assert_close(metrics.lse.double(), lse, rtol=1e-6, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(
        metrics.entropy.double(), entropy, rtol=1e-5, atol=1e-6, equal_nan=True
    )


# Tiles of rows, blocks of a row, tiles of positions: these have code for each dtype.
SHAPES = [(6, 50), (6, 5000), (2, 21, 7, 15)]
# One row, few positions, and empty batches.
OTHERS = [(7,), (2, 5, 3), (0, 5), (2, 5, 0)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.vectorised
@pytest.mark.sanitizer
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, dtype) for shape in SHAPES for dtype in DTYPES] + [(s, torch.float32) for s in OTHERS],
    ids=str,
)
def test_metrics_of_classes_and_probabilities_are_exact(device, shape, dtype):
    logits, target = batch(device, shape, dtype, scale=3)
    target.view(-1)[::3] = -100
    logits.data.view(-1)[::9] = 1.0  # some are equal
    options, tolerance = {}, 0.0
    if shape == (2, 21, 7, 15):
        logits.data[0, :, 0, 0] = torch.nan
        options, tolerance = {"reduction": "none"}, 1e-6

    loss, metrics = ampfuse.cross_entropy(logits, target, return_metrics=True, **options)

    lse, entropy, argmax = expected_of(logits)
    of_loss = torch.promote_types(dtype, torch.float32)
    assert metrics.lse.dtype == metrics.entropy.dtype == loss.dtype == of_loss
    assert [x.requires_grad for x in metrics] == [False] * 4
    assert_metrics(metrics, lse, entropy)
    torch.testing.assert_close(metrics.argmax, argmax)
    torch.testing.assert_close(metrics.correct, (argmax == target) & (target != -100))
    plain = ampfuse.cross_entropy(logits, target, **options)
    torch.testing.assert_close(loss, plain, rtol=tolerance, atol=tolerance, equal_nan=True)

    target = torch.rand(shape, device=device).to(dtype)
    metrics = metrics_of(logits, target)
    assert_metrics(metrics, lse, entropy)
    torch.testing.assert_close(metrics.argmax, argmax)
    torch.testing.assert_close(metrics.correct, argmax == target.argmax(min(1, len(shape) - 1)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradient_has_the_same_bits_with_and_without_metrics(device, dtype):
    """The gradient comes from forward or from backward, and the loss has one or many elements."""

    def with_metrics(logits, target, **options):
        return ampfuse.cross_entropy(logits, target, return_metrics=True, **options)[0]

    logits, target = batch(device, (2, 50, 3, 4), dtype, scale=3)
    target[0, 1] = -100
    for reduction in ("none", "mean", "sum"):
        _, grad = results(with_metrics, logits, target, reduction=reduction)
        _, expected = results(ampfuse.cross_entropy, logits, target, reduction=reduction)
        assert torch.equal(grad, expected), reduction


@pytest.mark.vectorised
@pytest.mark.parametrize("classes", [50, 5000])
def test_metrics_are_computed_from_soft_capped_logits(device, classes):
    """Soft-capped logits have the same order as the logits, and so the same argmax."""
    logits, target = batch(device, (6, classes), scale=3)
    metrics = metrics_of(logits, target, softcap=2.0)
    lse, entropy, _ = expected_of(2.0 * torch.tanh(logits.detach().double() / 2.0))
    assert_metrics(metrics, lse, entropy)
    assert torch.equal(metrics.argmax, logits.argmax(1))


def test_metrics_do_not_depend_on_weights_smoothing_and_z_loss(device):
    logits, target = batch(device, scale=3)
    weight = torch.rand(50, device=device)
    plain = metrics_of(logits, target)
    other = metrics_of(logits, target, weight, label_smoothing=0.3, z_loss=0.1)
    torch.testing.assert_close(other, plain)


@pytest.mark.vectorised
@pytest.mark.parametrize("classes", [7, 5000])
def test_argmax_is_the_first_of_equal_logits(device, classes):
    logits = torch.zeros(3, classes, device=device)
    logits[1, classes // 2 :] = 1
    logits[2, classes - 1] = 1
    target = torch.tensor([0, classes // 2, classes - 1], device=device)
    metrics = metrics_of(logits, target)
    assert metrics.argmax.tolist() == target.tolist()
    assert metrics.correct.all()


@pytest.mark.vectorised
@pytest.mark.parametrize("classes", [4, 5000])
def test_metrics_of_certain_uniform_infinite_and_nan_rows_are_exact(device, classes):
    """The rows are certain of one class, uniform, -inf except for one class, and NaN."""
    logits = torch.zeros(4, classes, device=device)
    logits[0, 3] = 500
    logits[2, 1:] = -math.inf
    logits[3, 2] = math.nan
    metrics = metrics_of(logits, torch.tensor([3, 0, 0, 2], device=device), reduction="none")
    of_row = torch.tensor([0, math.log(classes), 0, math.nan])
    torch.testing.assert_close(metrics.entropy.cpu(), of_row, equal_nan=True)
    of_row[0] = 500
    torch.testing.assert_close(metrics.lse.cpu(), of_row, equal_nan=True)
    assert metrics.argmax.tolist() == [3, 0, 0, 2]


@pytest.mark.parametrize("ignore_index", [-100, 50, 7])
def test_metrics_of_ignored_rows_are_reported_but_never_correct(device, ignore_index):
    logits, target = batch(device, scale=3)
    logits.data[2, 7] = 9.0
    target[:] = logits.argmax(1)
    expected = metrics_of(logits, target)
    assert expected.correct.all()

    target[2] = ignore_index
    metrics = metrics_of(logits, target, ignore_index=ignore_index)

    assert metrics.correct.tolist() == [True, True, False, True, True, True]
    torch.testing.assert_close(metrics[:3], expected[:3])


def test_target_of_a_narrow_dtype_is_not_mistaken_for_ignore_index(device):
    # Cast to a byte -100 is 156, and cut to 32 bits 2³² + 7 is 7.
    for index, ignored in ((156, -100), (7, 2**32 + 7)):
        logits = torch.zeros(1, 200, device=device)
        logits[0, index] = 1
        for dtype in (torch.uint8, torch.int32, torch.int64):
            target = torch.tensor([index], dtype=dtype, device=device)
            assert metrics_of(logits, target, ignore_index=ignored).correct.tolist() == [True]


def test_metrics_in_a_compiled_function_equal_eager_ones(device):
    logits, target = batch(device, scale=3)

    def of(logits, target):
        return ampfuse.cross_entropy(logits * 2, target, return_metrics=True)

    torch._dynamo.reset()
    loss, metrics = torch.compile(of, fullgraph=True, backend="aot_eager")(logits, target)
    torch.testing.assert_close(loss, functional.cross_entropy(logits * 2, target))
    torch.testing.assert_close(metrics, of(logits, target)[1])
