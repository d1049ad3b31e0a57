"""Tests of the error of linear_cross_entropy: compared with torch's, and for extreme logits."""

import math

import ampfuse
import pytest
import torch
from linear_reference import Head, exactly, head, off
from torch.nn import functional

ROWS, FEATURES, CLASSES = 512, 64, 2003


def batch_of(device, dtype, spread):
    """Return a batch whose logits have the standard deviation `spread`."""
    batch = head(device, dtype, ROWS, FEATURES, CLASSES, bias=False)
    with torch.no_grad():
        batch.weight.mul_(3 * spread / FEATURES**0.5)
    return batch


def error(result, expected):
    """Return the relative root mean square error."""
    return ((result.double() - expected).square().mean() / expected.square().mean()).sqrt().item()


def errors(batch, loss, expected):
    grads = [error(g, e) for g, e in zip(batch.grads(loss), expected.grads, strict=True)]
    return [error(loss.detach(), expected.loss), *grads]


def eager(batch, wide):
    logits = functional.linear(batch.hidden, batch.weight)
    return functional.cross_entropy(logits.to(wide), batch.target)


@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 16.0])
def test_bfloat16_errors_are_as_small_as_torchs_with_float32_logits(device, spread):
    batch = batch_of(device, torch.bfloat16, spread)
    expected = exactly(batch)
    ours = errors(batch, batch.loss(chunk_rows=128), expected)
    torchs = errors(batch, eager(batch, torch.float32), expected)
    for mine, other in zip(ours, torchs, strict=True):
        assert mine <= 1.1 * other


@pytest.mark.parametrize("spread", [1.0, 16.0])
def test_large_bfloat16_logits_are_not_rounded(device, spread):
    """A logit of 40 in bfloat16 would be off by up to 1/8, and its probability by a tenth."""
    batch = batch_of(device, torch.bfloat16, spread)
    expected = exactly(batch, reduction="none")
    loss = batch.loss(reduction="none", chunk_rows=128)
    assert off(loss, expected.loss) <= 1e-6
    rounded = functional.linear(batch.hidden, batch.weight).float()
    assert off(functional.cross_entropy(rounded, batch.target, reduction="none"), expected.loss) > (
        1e-4
    )


@pytest.mark.parametrize("spread", [0.1, 1.0, 16.0])
def test_float32_errors_are_as_small_as_torchs(device, spread):
    batch = batch_of(device, torch.float32, spread)
    expected = exactly(batch)
    ours = errors(batch, batch.loss(chunk_rows=128), expected)
    torchs = errors(batch, eager(batch, torch.float32), expected)
    # The factor allows for chunks, which are added up in another order.
    for mine, other in zip(ours, torchs, strict=True):
        assert mine <= 1.25 * other + 1e-7


@pytest.mark.parametrize("spread", [0.1, 1.0, 16.0])
def test_float64_results_are_exact(device, spread):
    batch = batch_of(device, torch.float64, spread)
    expected = exactly(batch)
    loss = batch.loss(chunk_rows=100)
    assert off(loss, expected.loss) <= 1e-10
    for grad, right in zip(batch.grads(loss), expected.grads, strict=True):
        assert off(grad, right) <= 1e-10


def sure_of(device, dtype, ahead):
    """Return a batch of rows whose target has a logit of `ahead`, and all other classes 0."""
    classes = features = 64
    hidden = torch.eye(features, device=device, dtype=dtype)[:32].requires_grad_()
    weight = (ahead * torch.eye(classes, device=device)).to(dtype).requires_grad_()
    return Head(hidden, weight, None, torch.arange(32, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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
    for grad, right in zip(batch.grads(loss, 2.0**10), expected.grads, strict=True):
        assert off(grad, right) <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e4, 2.0**24])
def test_huge_logits_give_finite_and_accurate_results(device, dtype, size):
    batch = sure_of(device, dtype, size)
    batch.target = batch.target.roll(1)  # now each row is wrong by `size`
    loss = batch.loss(chunk_rows=10)
    expected = exactly(batch)
    assert off(loss, expected.loss) <= 1e-6
    for grad, right in zip(batch.grads(loss), expected.grads, strict=True):
        assert off(grad, right) <= 1.5e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_logits_except_one_may_be_minus_infinity(device, dtype):
    batch = head(device, dtype, rows=6, features=4, classes=9)
    with torch.no_grad():
        batch.bias.fill_(-torch.inf)
        batch.bias[5] = 0
    batch.target.fill_(5)
    loss = batch.loss(chunk_rows=4)
    assert loss == 0
    for grad in batch.grads(loss):
        assert (grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bias_may_be_minus_infinity_for_thousands_of_classes(device, dtype, smoothing):
    batch = head(device, dtype, rows=6, classes=5000)
    batch.target.clamp_(min=0).remainder_(10)
    batch.bias.detach()[10:] = -math.inf
    options = {"label_smoothing": smoothing}
    loss, right = batch.loss(**options), exactly(batch, **options)
    assert torch.allclose(loss.double(), right.loss, rtol=1e-6)
    for grad, expected in zip(batch.grads(loss), right.grads, strict=True):
        assert off(grad, expected) <= 8e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_in_hidden_states_makes_the_loss_of_its_row_nan(device, dtype):
    batch = head(device, dtype)
    with torch.no_grad():
        batch.hidden[4, 3] = torch.nan
    loss = batch.loss(reduction="none", chunk_rows=8)
    assert loss[4].isnan()
    assert loss[:3].isfinite().all()
    assert batch.loss(chunk_rows=8).isnan()


def test_float16_inputs_may_have_logits_beyond_the_range_of_float16(device):
    batch = head(device, torch.float16, rows=6, features=4, classes=9, bias=False)
    with torch.no_grad():
        batch.hidden.mul_(300)
        batch.weight.mul_(300)
    logits = functional.linear(batch.hidden.double(), batch.weight.double())
    assert logits.abs().max() > 65504
    assert off(batch.loss(), exactly(batch).loss) <= 1e-6


def test_float16_hidden_states_keep_their_gradients_under_bfloat16_autocast(device):
    """Without a scale of their own, gradients of means over many rows would round to 0."""
    generator = torch.Generator().manual_seed(0)
    rows = 65536
    hidden = torch.randn(rows, 64, generator=generator).to(device).half().requires_grad_()
    weight = 0.02 * torch.randn(600, 64, generator=generator).to(device)
    target = torch.randint(600, (rows,), generator=generator).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        loss = ampfuse.linear_cross_entropy(hidden, weight, target)
    (loss * rows).backward()
    exact = hidden.detach().double().requires_grad_()
    logits = exact @ weight.double().T
    torch.nn.functional.cross_entropy(logits, target, reduction="sum").backward()
    assert (hidden.grad.double() - exact.grad).norm() < 0.01 * exact.grad.norm()
