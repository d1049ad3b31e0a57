"""Tests of the error of linear_cross_entropy: compared with torch's, and for extreme logits."""

import math

import ampfuse
import pytest
import torch
from linear_reference import EVERY_WAY, Head, check_grads, exactly, head, off
from torch.nn import functional

ROWS, FEATURES, CLASSES = 512, 64, 2003
NARROW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
TWO_DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def batch_of(device, dtype, spread):
    """Return a batch whose logits have the standard deviation `spread`."""
    batch = head(device, dtype, ROWS, FEATURES, CLASSES, bias=False)
    with torch.no_grad():
        batch.weight.mul_(3 * spread / FEATURES**0.5)
    return batch


def errors(batch, loss, expected):
    """Return the relative root mean square errors of the loss and of the gradients."""
    results = zip(
        [loss.detach(), *batch.grads(loss)], [expected.loss, *expected.grads], strict=True
    )
    return [((one.double() - right).norm() / right.norm()).item() for one, right in results]


# The factor of float32 allows for chunks, which are added up in another order.
@pytest.mark.vectorised
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 16.0])
@pytest.mark.parametrize(
    ("dtype", "factor", "more"), [(torch.bfloat16, 1.1, 0), (torch.float32, 1.25, 1e-7)]
)
def test_errors_are_as_small_as_torchs_with_float32_logits(device, dtype, factor, more, spread):
    batch = batch_of(device, dtype, spread)
    expected = exactly(batch)
    logits = functional.linear(batch.hidden, batch.weight).float()
    torchs = errors(batch, functional.cross_entropy(logits, batch.target), expected)
    ours = errors(batch, batch.loss(chunk_rows=128), expected)
    for mine, other in zip(ours, torchs, strict=True):
        assert mine <= factor * other + more


@pytest.mark.parametrize("spread", [1.0, 16.0])
def test_large_bfloat16_logits_are_not_rounded_unless_this_is_asked_for(device, spread):
    """A logit of 40 in bfloat16 would be off by up to 1/8, and its probability by a tenth."""
    batch = batch_of(device, torch.bfloat16, spread)
    expected = exactly(batch, reduction="none").loss
    assert off(batch.loss(reduction="none", chunk_rows=128), expected) <= 1e-6
    rounded = batch.loss(reduction="none", chunk_rows=128, logits_dtype=torch.bfloat16)
    assert off(rounded, expected) > 1e-4


@pytest.mark.vectorised
@pytest.mark.parametrize("spread", [0.1, 1.0, 16.0])
def test_float64_results_are_exact(device, spread):
    batch = batch_of(device, torch.float64, spread)
    expected = exactly(batch)
    loss = batch.loss(chunk_rows=100)
    assert off(loss, expected.loss) <= 1e-10
    check_grads(batch.grads(loss), expected.grads, 1e-10)


def sure_of(device, dtype, ahead):
    """Return a batch of rows whose target has a logit of `ahead`, and all other classes 0."""
    classes = features = 64
    hidden = torch.eye(features, device=device, dtype=dtype)[:32].requires_grad_()
    weight = (ahead * torch.eye(classes, device=device)).to(dtype).requires_grad_()
    return Head(hidden, weight, None, torch.arange(32, device=device))


@pytest.mark.vectorised
@NARROW
@pytest.mark.parametrize("ahead", [10.0, 16.0, 20.0])
def test_confident_rows_have_accurate_gradients(device, dtype, ahead):
    batch = sure_of(device, dtype, ahead)
    expected = exactly(batch, 2.0**10)
    loss = batch.loss(chunk_rows=10)
    assert off(loss, expected.loss) <= 1e-6
    allowed = 1e-5 if dtype == torch.float32 else 1.5e-2
    if device.type == "cuda" and dtype == torch.float16:
        # A GPU's products read logit gradients in float16, where small numbers are 6e-8 apart.
        allowed += 6e-8 / math.exp(-ahead) / 64
    check_grads(batch.grads(loss, 2.0**10), expected.grads, allowed)


@pytest.mark.vectorised
@TWO_DTYPES
@pytest.mark.parametrize("size", [1e4, 2.0**24])
def test_huge_logits_give_finite_and_accurate_results(device, dtype, size):
    batch = sure_of(device, dtype, size)
    batch.target = batch.target.roll(1)  # now each row is wrong by `size`
    loss, expected = batch.loss(chunk_rows=10), exactly(batch)
    assert off(loss, expected.loss) <= 1e-6
    check_grads(batch.grads(loss), expected.grads, 1.5e-2)


@TWO_DTYPES
def test_all_logits_except_one_may_be_minus_infinity(device, dtype):
    batch = head(device, dtype, rows=6, features=4, classes=9)
    with torch.no_grad():
        batch.bias.fill_(-torch.inf)
        batch.bias[5] = 0
    batch.target.fill_(5)
    loss = batch.loss(chunk_rows=4)
    assert loss == 0
    assert all((grad == 0).all() for grad in batch.grads(loss))


@pytest.mark.vectorised
@NARROW
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bias_may_be_minus_infinity_for_thousands_of_classes(device, dtype, smoothing):
    batch = head(device, dtype, rows=6, classes=5000)
    batch.target.clamp_(min=0).remainder_(10)
    batch.bias.detach()[10:] = -math.inf
    options = {"label_smoothing": smoothing}
    loss, right = batch.loss(**options), exactly(batch, **options)
    assert torch.allclose(loss.double(), right.loss, rtol=1e-6)
    check_grads(batch.grads(loss), right.grads, 8e-3)


@EVERY_WAY
@NARROW
def test_nan_and_infinite_hidden_states_make_their_row_nan(device, how, dtype):
    for value in (torch.nan, torch.inf, -torch.inf):
        batch = head(device, dtype, bias=False)
        batch.hidden.detach()[0, 0] = value
        loss = batch.loss(**how)
        grad_hidden, grad_weight = batch.grads(loss)
        of_rows = loss if how["reduction"] == "none" else loss[None]
        assert of_rows[0].isnan(), value
        assert of_rows[1:].isfinite().all(), value
        assert grad_hidden[0].isnan().all(), value
        assert grad_hidden[1:].isfinite().all(), value
        assert grad_weight[:, 0].isnan().all(), value


def test_float16_inputs_may_have_logits_beyond_the_range_of_float16(device):
    batch = head(device, torch.float16, rows=6, features=4, classes=9, bias=False)
    with torch.no_grad():
        batch.hidden.mul_(300)
        batch.weight.mul_(300)
    assert batch.exact_logits().abs().max() > 65504
    assert off(batch.loss(), exactly(batch).loss) <= 1e-6


def test_float16_hidden_states_keep_their_gradients_under_bfloat16_autocast(device):
    """Without a scale of their own, gradients of 3e-7 would be rounded by up to 3e-8."""
    generator = torch.Generator().manual_seed(0)
    rows = 4096
    hidden = torch.randn(rows, 64, generator=generator).to(device).half().requires_grad_()
    weight = 0.00125 * torch.randn(600, 64, generator=generator).to(device)
    target = torch.randint(600, (rows,), generator=generator).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = ampfuse.linear_cross_entropy(hidden, weight, target)
    (loss * rows).backward()
    exact = hidden.detach().double().requires_grad_()
    functional.cross_entropy(exact @ weight.double().T, target, reduction="sum").backward()
    assert (hidden.grad.double() - exact.grad).norm() < 0.01 * exact.grad.norm()
