"""Tests of what a mean divides by, and of grad_scale and denominator: numbers and tensors."""

from decimal import Decimal
from fractions import Fraction

import ampfuse
import pytest
import torch
from cross_entropy_reference import assert_exact, exact, results
from cross_entropy_samples import batch
from torch.nn import functional


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("rows", [0, 3])
def test_batch_without_counted_rows_gives_torchs_loss_and_a_zero_gradient(device, reduction, rows):
    """The cases are an empty batch and a batch of ignored rows."""
    logits = torch.randn(rows, 5, device=device, requires_grad=True)
    target = torch.full((rows,), -100, device=device)
    loss, grad = results(ampfuse.cross_entropy, logits, target, reduction=reduction)
    expected = functional.cross_entropy(logits.detach(), target, reduction=reduction)
    torch.testing.assert_close(loss, expected, equal_nan=True)
    assert (grad == 0).all()
    if reduction == "mean":  # such a micro-batch adds 0 if others of its batch have targets
        loss, grad = results(ampfuse.cross_entropy, logits, target, denominator=5.0)
        assert loss == 0
        assert (grad == 0).all()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_targets_of_zero_weight_give_torchs_loss_and_gradient(device, reduction):
    """Their mean is NaN, as in torch."""
    logits, target = batch(device)
    options = {"weight": torch.rand(50, device=device), "reduction": reduction}
    options["weight"][target] = 0
    found, expected = (
        results(function, logits, target, **options)
        for function in (ampfuse.cross_entropy, functional.cross_entropy)
    )
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_mean_over_targets_of_zero_weight_is_not_finite_with_smoothing(device):
    """The smoothing terms are divided by a zero weight. torch adds 0 / 0 to the result."""
    logits, target = batch(device)
    weight = torch.rand(50, device=device)
    weight[target] = 0
    for function in (ampfuse.cross_entropy, functional.cross_entropy):
        loss, grad = results(function, logits, target, weight=weight, label_smoothing=0.1)
        assert not loss.isfinite()
        assert not grad.isfinite().any()


# --- z_loss, for both losses --------------------------------------------------------------------


def cross_entropy(logits, target, weight, **options):
    return ampfuse.cross_entropy(logits, target, weight, **options)


def linear_cross_entropy(logits, target, weight, **options):
    identity = torch.eye(len(weight), dtype=logits.dtype, device=logits.device)
    return ampfuse.linear_cross_entropy(logits, identity, target, class_weight=weight, **options)


@pytest.mark.parametrize("loss", [cross_entropy, linear_cross_entropy])
@pytest.mark.parametrize("divisor", ["class weights", "rows", "denominator"])
def test_mean_divides_the_z_loss_like_the_rest_of_the_loss(device, loss, divisor):
    """By the weights of the counted targets; by the rows if targets are probabilities."""
    logits, target = batch(device, (4, 10), torch.float64, leaf=False)
    weight = torch.linspace(0.5, 2, 10, dtype=torch.float64, device=device)
    counted, options, expected = slice(None), {}, 4
    if divisor == "class weights":
        target = torch.tensor([1, -100, 3, 3], device=device)
        counted = target != -100
        expected = weight[target[counted]].sum()  # neither 3, the number of counted rows, nor 1
    elif divisor == "rows":
        target = torch.full_like(logits, 1 / 10)
    else:
        options["denominator"] = expected = 7

    with_z_loss = loss(logits, target, weight, z_loss=1.0, **options)
    z_loss = with_z_loss - loss(logits, target, weight, **options)

    squares = logits.logsumexp(1).square()[counted]
    assert z_loss.item() == pytest.approx((squares.sum() / expected).item())


# --- grad_scale and denominator -----------------------------------------------------------------


NUMBER_DTYPES = [torch.float32, torch.float64, torch.float16, torch.int64]


def test_grad_scale_and_denominator_may_be_numbers_or_tensors_of_any_dtype_and_device(device):
    logits, target = batch(device, dtype=torch.bfloat16)
    expected = exact(logits, target, 8.0, denominator=8.0)
    numbers = [8, 8.0]
    for where in {device.type, "cpu"}:
        for shape in ((), (1,), (1, 1)):
            numbers += [torch.full(shape, 8, dtype=x, device=where) for x in NUMBER_DTYPES]
    for number in numbers:
        options = {"grad_scale": number, "denominator": number}
        found = results(ampfuse.cross_entropy, logits, target, 8.0, **options)
        assert_exact(found, expected, number)


NO_NUMBERS = {
    "two": (lambda: torch.ones(2), "expected one number, got float32 of shape \\[2\\]"),
    "none": (lambda: torch.ones(0), "expected one number, got float32 of shape \\[0\\]"),
    "complex": (lambda: torch.ones((), dtype=torch.cfloat), "expected one number, got complex64"),
    "sparse": (lambda: torch.ones(1).to_sparse(), "expected a strided tensor, got layout Sparse"),
    "a gradient": (
        lambda: torch.ones((), requires_grad=True),
        "expected a tensor that does not require grad",
    ),
}


@pytest.mark.parametrize("name", ["grad_scale", "denominator"])
@pytest.mark.parametrize(("number", "words"), NO_NUMBERS.values(), ids=list(NO_NUMBERS))
def test_grad_scale_and_denominator_must_be_one_constant_number(device, name, number, words):
    logits, target = batch(device)
    number = number().to(device).detach().requires_grad_(number().requires_grad)
    for function in (ampfuse.cross_entropy, ampfuse.cross_entropy_):
        with pytest.raises(ValueError, match=f"{name}: {words}"):
            function(logits * 1, target, **{name: number})


@pytest.mark.parametrize("shape", [(6, 50), (2, 50, 3, 4)], ids=str)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_denominator_as_a_number_divides_the_sum_of_losses(device, shape, is_weighted):
    """It replaces the weight of the targets, too."""
    logits, target = batch(device, shape, torch.float64)
    target.view(-1)[0] = -100
    weight = torch.rand(50, dtype=torch.float64, device=device) if is_weighted else None
    total = results(functional.cross_entropy, logits, target, weight=weight, reduction="sum")
    for number in (3, 3.0, -0.5, 1e-30, 1e300, True, Fraction(1, 2), Decimal("0.5")):
        found = results(ampfuse.cross_entropy, logits, target, weight=weight, denominator=number)
        expected = [x / float(number) for x in total]
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_denominator_that_is_a_zero_tensor_makes_loss_and_gradient_infinite_or_nan(device):
    """With a finite gradient, a scaler would not skip the step."""
    zero = torch.zeros((), device=device)
    loss, grad = results(ampfuse.cross_entropy, *batch(device), denominator=zero)
    assert not loss.isfinite()
    assert not grad.isfinite().any()
