"""Tests of how linear_cross_entropy holds its logits: some classes at a time, or in 16 bits.

Tests of other files compare tiles of classes with float64, too, for all options: see EVERY_WAY.
"""

import ampfuse
import pytest
import torch
from linear_reference import (
    EVERY_DTYPE,
    EVERY_REDUCTION,
    TOLERANCE,
    check,
    check_grads,
    exactly,
    head,
    off,
)
from linear_samples import forward
from op_overloads import overload
from torch.nn import functional

BFLOAT16, FLOAT = torch.bfloat16, torch.float32

# --- chunk_classes: all rows, and some of the classes at a time -----------------------------------


@pytest.mark.vectorised
@EVERY_DTYPE
def test_tiles_of_any_number_of_classes_give_exact_results(device, dtype):
    # One class at a time, a shorter last tile, a last tile of one class, one tile, and a tile with
    # room for more.
    for chunk_classes in (1, 32, 100, 101, 1000):
        for bias in (False, True):
            for reduction in ("mean", "sum"):
                options = {"chunk_classes": chunk_classes, "reduction": reduction}
                check(head(device, dtype, bias=bias), upstream=0.5, **options)
    check(head(device, dtype), chunk_classes=32, denominator=7.1)
    check(head(device, dtype, rows=1), chunk_classes=32)


@pytest.mark.sanitizer
@pytest.mark.vectorised
def test_loss_is_that_of_chunks_of_rows_to_the_last_digits(device):
    batch = head(device, BFLOAT16, rows=300, classes=1000)
    losses = [batch.loss(chunk_rows=300), batch.loss(chunk_classes=256)]
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    torch.testing.assert_close(*map(batch.grads, losses), rtol=2**-7, atol=1e-6)


def test_float16_gradients_keep_their_digits_under_a_loss_scale(device):
    batch = head(device, torch.float16, rows=64, classes=3000)
    scale = torch.tensor(2.0**16, device=device)
    check(batch, chunk_classes=512, grad_scale=scale, upstream=scale)


@pytest.mark.parametrize("options", [{"chunk_classes": 32}, {"logits_dtype": BFLOAT16}], ids=str)
def test_autocast_converts_the_weight(device, options):
    batch = head(device, FLOAT, bias=False)
    with torch.autocast(device.type, BFLOAT16):
        loss = batch.loss(**options)
    assert torch.equal(loss, batch.as_leaves(BFLOAT16).loss(**options))
    assert all(grad.dtype == FLOAT for grad in batch.grads(loss))


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_logits_are_float32(device, dtype):
    batch = head(device, dtype)
    loss = ampfuse.linear_cross_entropy(
        batch.hidden, batch.weight, batch.target, batch.bias, chunk_classes=32
    )
    assert torch.equal(loss, batch.loss(chunk_classes=32))
    with pytest.raises(TypeError, match="expected float32 with a process group or chunk_classes"):
        batch.loss(chunk_classes=32, logits_dtype=dtype)


def test_the_result_is_the_exact_one_for_a_large_vocabulary(device):
    batch = head(device, FLOAT, rows=40, features=16, classes=50_257)
    expected = functional.cross_entropy(batch.exact_logits(), batch.target)
    torch.testing.assert_close(batch.loss(chunk_classes=4096).double(), expected, rtol=1e-6, atol=0)


# --- logits_dtype ---------------------------------------------------------------------------------


def rounded_logits(batch):
    """Return the logits as a product of floats has them, rounded to the weight's dtype."""
    floats = batch.as_leaves(FLOAT)
    with torch.no_grad():
        return functional.linear(floats.hidden, floats.weight, floats.bias).to(batch.weight.dtype)


def check_rounded(batch, upstream=1.0, chunk_rows=None, **options):
    """Check the loss of 16-bit logits, and the gradients that follow from them."""
    dtype = batch.weight.dtype
    loss = batch.loss(logits_dtype=dtype, chunk_rows=chunk_rows, **options)
    expected = exactly(batch, upstream, logits=rounded_logits(batch), **options)
    assert loss.dtype == FLOAT
    assert off(loss, expected.loss) <= 1e-3  # a few logits may be rounded to the other neighbour
    grads = batch.grads(loss, upstream)
    check_grads(grads, expected.grads, 2 * TOLERANCE[dtype], f"{dtype}, {options}")


@pytest.mark.vectorised
@EVERY_REDUCTION
@pytest.mark.parametrize("chunk_rows", [None, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_16_bit_logits_are_rounded_once(device, reduction, chunk_rows, bias):
    for dtype in [BFLOAT16, torch.float16] if device.type == "cuda" else [BFLOAT16]:
        batch = head(device, dtype, bias=bias)
        options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3}
        upstream = torch.linspace(0.1, 0.5, 21).to(device) if reduction == "none" else 0.25
        check_rounded(batch, upstream, chunk_rows, **options)


@pytest.mark.parametrize("rows", [0, 1])
def test_16_bit_logits_of_few_rows(device, rows):
    check_rounded(head(device, BFLOAT16, rows=rows), reduction="sum")


def test_metrics_are_those_of_the_rounded_logits(device):
    batch = head(device, BFLOAT16)
    _, metrics = batch.loss(logits_dtype=BFLOAT16, return_metrics=True)
    logits = rounded_logits(batch).double()
    assert off(metrics.lse, logits.logsumexp(-1)) <= 1e-3
    same = metrics.argmax == logits.argmax(-1)
    assert same.sum() >= len(same) - 1


def test_logits_have_the_products_dtype_on_a_gpu_and_float32_on_a_cpu_by_default(device):
    batch = head(device, BFLOAT16)
    tensors = batch.hidden, batch.weight, batch.target, batch.bias
    default = BFLOAT16 if device.type == "cuda" else FLOAT
    losses = [
        ampfuse.linear_cross_entropy(*tensors, logits_dtype=dtype) for dtype in (None, default)
    ]
    assert torch.equal(*losses)
    assert all(map(torch.equal, *map(batch.grads, losses)))


def test_infinite_and_nan_logits(device):
    batch = head(device, BFLOAT16, bias=True)
    options = {"logits_dtype": BFLOAT16, "reduction": "none"}
    with torch.no_grad():
        batch.bias[7] = -torch.inf
        assert torch.equal(batch.loss(**options).isinf(), batch.target == 7)
        batch.bias[7] = torch.nan
        assert torch.equal(batch.loss(**options).isnan(), batch.target != -100)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "wrong", "expected"),
    [
        (BFLOAT16, torch.float16, "bfloat16 or float32 for products of bfloat16, got float16"),
        (BFLOAT16, torch.float64, "bfloat16 or float32 for products of bfloat16, got float64"),
        (FLOAT, BFLOAT16, "expected float32 for products of float32, got bfloat16"),
        (torch.float64, FLOAT, "expected float64 for products of float64, got float32"),
    ],
)
def test_wrong_logits_dtype_raises(device, dtype, wrong, expected):
    batch = head(device, dtype)
    with pytest.raises(TypeError, match=f"linear_cross_entropy: logits_dtype: .*{expected}"):
        batch.loss(logits_dtype=wrong)
    sample = list(forward(dtype, device, 8))
    sample[13] = wrong
    with pytest.raises(TypeError, match=expected):
        overload("linear_cross_entropy_forward")(*sample)


def test_logits_dtype_that_is_no_dtype_raises(device):
    with pytest.raises(TypeError, match=r"logits_dtype: expected a torch\.dtype, got str"):
        head(device, BFLOAT16).loss(logits_dtype="bfloat16")


def test_float16_logits_need_a_gpu():
    batch = head(torch.device("cpu"), torch.float16)
    with pytest.raises(TypeError, match="logits_dtype: expected float32, since this device has no"):
        batch.loss(logits_dtype=torch.float16)


def test_logits_of_a_shard_are_float32(device):
    batch = head(device, BFLOAT16)
    options = {"group": "0", "vocab_shard": [1, 0, 101], "logits_dtype": BFLOAT16}
    with pytest.raises(TypeError, match="logits_dtype: expected float32 with a process group"):
        torch.ops.ampfuse.linear_cross_entropy(batch.hidden, batch.weight, batch.target, **options)
