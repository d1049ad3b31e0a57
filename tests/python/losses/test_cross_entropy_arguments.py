"""Tests of unusual and invalid arguments of cross_entropy."""

import subprocess
import sys
from decimal import Decimal
from fractions import Fraction

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, ulps_off
from torch.nn import functional


def batch(device, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()
    index_shape = shape[:1] + shape[2:]
    return logits, torch.randint(shape[1], index_shape, generator=generator).to(device)


def results(function, logits, target, upstream=1.0, **options):
    """Return the loss and the gradient."""
    loss = function(logits, target, **options)
    return loss.detach(), *torch.autograd.grad(loss, logits, torch.full_like(loss, upstream))


def assert_as_in_torch(logits, target, **options):
    expected = results(functional.cross_entropy, logits, target.long(), **options)
    found = results(ampfuse.cross_entropy, logits, target, **options)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-5, atol=1e-6)


# --- weights and smoothing ----------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_targets_of_zero_weight_give_torchs_loss_and_gradient(device, reduction):
    """Their mean is NaN, as in torch."""
    logits, target = batch(device, 6, 50)
    weight = torch.rand(50, device=device)
    weight[target] = 0
    assert_as_in_torch(logits, target, weight=weight, reduction=reduction)


def test_mean_over_targets_of_zero_weight_is_not_finite_with_smoothing(device):
    """The smoothing terms are divided by a zero weight. torch adds 0 / 0 to the result."""
    logits, target = batch(device, 6, 50)
    weight = torch.rand(50, device=device)
    weight[target] = 0
    for function in (ampfuse.cross_entropy, functional.cross_entropy):
        loss, grad = results(function, logits, target, weight=weight, label_smoothing=0.1)
        assert not loss.isfinite()
        assert not grad.isfinite().any()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_label_smoothing_of_one_gives_torchs_loss_and_gradient(device, reduction, probabilities):
    logits, target = batch(device, 6, 50)
    options = {"label_smoothing": 1.0, "reduction": reduction}
    if probabilities:
        target = torch.rand(6, 50, device=device)
        found = results(ampfuse.cross_entropy, logits, target, **options)
        expected = results(functional.cross_entropy, logits, target, **options)
        torch.testing.assert_close(found, expected)
    else:
        assert_as_in_torch(logits, target, **options)


def test_ignored_targets_do_not_count_with_smoothing_and_weights(device):
    logits, target = batch(device, 6, 50)
    target[1:3] = -100
    options = {"label_smoothing": 0.3, "weight": torch.rand(50, device=device)}
    assert_as_in_torch(logits, target, **options)


def test_weight_may_have_another_dtype_than_the_logits(device):
    logits, target = batch(device, 6, 50)
    weight = torch.rand(50, device=device)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        found = ampfuse.cross_entropy(logits, target, weight.to(dtype))
        expected, _ = exact(logits, target, weight=weight.to(dtype))
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


# --- targets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [-100, 255, 156, 7])
def test_uint8_targets_are_compared_with_ignore_index_as_integers(device, ignore_index):
    """No byte equals -100. If -100 were cast to a byte, it would be 156."""
    logits, _ = batch(device, 6, 300)
    target = torch.tensor([255, 156, 7, 200, 0, 255], dtype=torch.uint8, device=device)
    assert_as_in_torch(logits, target, ignore_index=ignore_index)


@pytest.mark.parametrize("ignore_index", [2**32 + 1, -(2**32) + 1, 2**63 - 1])
def test_ignore_index_may_be_out_of_range_of_the_target_dtype(device, ignore_index):
    logits, _ = batch(device, 6, 50)
    for dtype in (torch.int32, torch.uint8):
        target = torch.ones(6, dtype=dtype, device=device)  # 2³² + 1 is 1, too, if cut to 32 bits
        assert_as_in_torch(logits, target, ignore_index=ignore_index)


def test_targets_on_another_device_are_refused(device):
    logits, target = batch(device, 6, 50)
    for elsewhere in (target.to("meta"), torch.rand(6, 50, device="meta")):
        with pytest.raises(
            ValueError, match=rf"target: expected input's device, {device}.*, got meta"
        ):
            ampfuse.cross_entropy(logits, elsewhere)
        with pytest.raises(
            ValueError, match=rf"target: expected input's device, {device}.*, got meta"
        ):
            ampfuse.cross_entropy_(logits * 1, elsewhere)


@pytest.mark.parametrize("which", ["logits", "probabilities", "both"])
def test_an_empty_batch_may_have_any_strides(device, which):
    strided = torch.zeros(7, 6, device=device).t()[:0]
    plain = torch.zeros(0, 7, device=device)
    logits = plain if which == "probabilities" else strided
    target = torch.zeros(0, dtype=torch.long, device=device) if which == "logits" else strided
    assert ampfuse.cross_entropy(logits, target, reduction="sum") == 0


@pytest.mark.parametrize("name", ["target", "weight"])
def test_target_or_weight_whose_storage_was_freed_is_refused(name):
    """The call runs in a subprocess, which would crash if it read the freed memory."""
    program = f"""
import torch, ampfuse
target, weight = torch.zeros(3, dtype=torch.long), torch.ones(5)
{name}.untyped_storage().resize_(0)
ampfuse.cross_entropy(torch.zeros(3, 5), target, weight)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert f"{name}: " in result.stderr


# --- grad_scale and denominator -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_grad_scale_and_denominator_may_have_any_dtype_and_device(device, dtype, shape):
    logits, target = batch(device, 6, 50, dtype=torch.bfloat16)
    for where in {device.type, "cpu"}:
        number = torch.full(shape, 8, dtype=dtype, device=where)
        loss, grad = results(
            ampfuse.cross_entropy, logits, target, 8.0, grad_scale=number, denominator=number
        )
        expected, gradient = exact(logits, target, 8.0, denominator=8.0)
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        assert ulps_off(grad, gradient) <= ULPS


def test_grad_scale_and_denominator_may_be_python_numbers(device):
    logits, target = batch(device, 6, 50, dtype=torch.bfloat16)
    _, grad = results(ampfuse.cross_entropy, logits, target, 8.0, grad_scale=8.0, denominator=3)
    _, gradient = exact(logits, target, 8.0, denominator=3.0)
    assert ulps_off(grad, gradient) <= ULPS


REFUSED = {
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
@pytest.mark.parametrize(("number", "words"), REFUSED.values(), ids=list(REFUSED))
def test_grad_scale_and_denominator_must_be_one_constant_number(device, name, number, words):
    logits, target = batch(device, 6, 50)
    number = number().to(device).detach().requires_grad_(number().requires_grad)
    for function in (ampfuse.cross_entropy, ampfuse.cross_entropy_):
        with pytest.raises(ValueError, match=f"{name}: {words}"):
            function(logits * 1, target, **{name: number})


@pytest.mark.parametrize("denominator", [3, 3.0, -0.5, 1e-30, 1e300, True])
@pytest.mark.parametrize("shape", [(6, 50), (2, 50, 3, 4)], ids=str)
def test_denominator_as_a_number_divides_the_sum_of_losses(device, denominator, shape):
    logits, target = batch(device, *shape, dtype=torch.float64)
    target.view(-1)[0] = -100
    found = results(ampfuse.cross_entropy, logits, target, denominator=denominator)
    total = results(functional.cross_entropy, logits, target, reduction="sum")
    torch.testing.assert_close(found, [x / denominator for x in total], rtol=1e-12, atol=0)


def test_denominator_replaces_the_weight_of_the_targets(device):
    logits, target = batch(device, 6, 50)
    weight = torch.rand(50, device=device)
    found = results(ampfuse.cross_entropy, logits, target, weight=weight, denominator=4.0)
    total = results(functional.cross_entropy, logits, target, weight=weight, reduction="sum")
    torch.testing.assert_close(found, [x / 4 for x in total])


def test_denominator_that_is_a_zero_tensor_makes_loss_and_gradient_infinite_or_nan(device):
    """With a finite gradient, a scaler would not skip the step."""
    logits, target = batch(device, 6, 50)
    zero = torch.zeros((), device=device)
    loss, grad = results(ampfuse.cross_entropy, logits, target, denominator=zero)
    assert not loss.isfinite()
    assert not grad.isfinite().any()


def test_micro_batch_of_ignored_rows_adds_zero_with_a_denominator(device):
    """Other micro-batches of the same batch have targets."""
    logits, target = batch(device, 6, 50)
    loss, grad = results(ampfuse.cross_entropy, logits, target.fill_(-100), denominator=5.0)
    assert loss == 0
    assert (grad == 0).all()


def test_arguments_of_a_wrong_type_are_refused(device):
    logits, target = batch(device, 2, 3)
    one = torch.ones((), device=device)
    for scaler in (ampfuse.GradScaler(device.type), torch.amp.GradScaler(device.type)):
        with pytest.raises(TypeError, match=r"grad_scale: .*GradScaler; pass scaler.scale_tensor"):
            ampfuse.cross_entropy(logits, target, grad_scale=scaler)
    with pytest.raises(ValueError, match="denominator: expected a number other than 0"):
        ampfuse.cross_entropy(logits, target, denominator=0)
    with pytest.raises(TypeError, match="denominator: expected a number, got list"):
        ampfuse.cross_entropy(logits, target, denominator=[1])
    with pytest.raises(ValueError, match=r"expected indices .*, or probabilities .*, got float32"):
        ampfuse.cross_entropy(logits, target.float())
    for name in ("z_loss", "softcap"):
        with pytest.raises(TypeError, match=f"{name}: expected a number, got a tensor"):
            ampfuse.cross_entropy(logits, target, **{name: one})
    with pytest.raises(TypeError, match="target: expected a Tensor, got list"):
        ampfuse.cross_entropy(logits, [0, 1])


@pytest.mark.parametrize(
    "call",
    [
        lambda input, target: ampfuse.cross_entropy(input, target, grad_scale=2.0),
        lambda input, target: ampfuse.cross_entropy_(input, target, denominator=2.0),
        ampfuse.CrossEntropyLoss(),
        ampfuse.CrossEntropyLoss(scaler=ampfuse.GradScaler("cpu")),
        ampfuse.CrossEntropyLoss(scaler=torch.amp.GradScaler("cpu")),
    ],
    ids=["grad_scale", "denominator", "module", "scaler", "scaler of torch"],
)
def test_input_that_is_not_a_tensor_is_refused_by_name(call):
    with pytest.raises(TypeError, match=r"cross_entropy_?: input: expected a Tensor, got list"):
        call([[1.0, 2.0]], torch.tensor([0]))


@pytest.mark.parametrize("shape", [(4, 0), (2, 0, 16), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("probabilities", [False, True])
def test_rows_of_zero_classes_give_results_of_the_right_shape(device, shape, probabilities):
    logits = torch.empty(shape, device=device)
    target = torch.full((shape[0], *shape[2:]), -100, device=device)
    target = torch.empty(shape, device=device) if probabilities else target
    loss, *metrics = torch.ops.ampfuse.cross_entropy.metrics(logits, target, reduction=0)
    for result in (loss, *metrics):
        assert result.shape == (shape[0], *shape[2:])


@pytest.mark.parametrize("name", ["input", "target"])
@pytest.mark.parametrize("function", [ampfuse.cross_entropy, ampfuse.cross_entropy_])
def test_none_in_place_of_a_tensor_is_refused_by_name(function, name):
    logits, target = batch("cpu", 6, 50)
    given = {"input": logits * 1, "target": target} | {name: None}
    message = f"{function.__name__}: {name}: expected a Tensor, got None"
    with pytest.raises(TypeError, match=message):
        function(**given)


def test_denominator_may_be_a_fraction_or_a_decimal():
    logits, target = batch("cpu", 6, 50)
    expected = ampfuse.cross_entropy(logits, target, denominator=0.5)
    for number in (Fraction(1, 2), Decimal("0.5")):
        assert ampfuse.cross_entropy(logits, target, denominator=number) == expected


def test_sparse_weight_is_refused_by_name():
    logits, target = batch("cpu", 6, 50)
    with pytest.raises(ValueError, match="weight: expected a strided tensor, got layout Sparse"):
        ampfuse.cross_entropy(logits, target, torch.ones(50).to_sparse())


def test_gradients_of_float8_are_not_rescaled():
    memory = torch.ones(64).to(torch.float8_e4m3fn)
    rescale = torch.ops.ampfuse.cross_entropy_rescale_
    with pytest.raises(ValueError, match=r"expected floating-point rows .*, got float8_e4m3fn"):
        rescale(memory[:8].view(2, 4), torch.ones(()), torch.tensor(2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_probabilities_may_be_sliding_windows(device, dtype):
    logits, _ = batch(device, 3, 6)
    windows = torch.rand(8, device=device).to(dtype).unfold(0, 6, 1)
    torch.testing.assert_close(
        ampfuse.cross_entropy(logits, windows), ampfuse.cross_entropy(logits, windows.contiguous())
    )
