"""Tests of the dtype in which linear_cross_entropy stores its logits."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import exact
from harness.memory import extra_peak
from linear_reference import TOLERANCE, check, exactly, head, off
from linear_samples import forward
from op_overloads import overload
from torch.nn import functional

BFLOAT16 = torch.bfloat16


def rounded_logits(batch):
    """Return the logits as a product of floats has them, rounded to the weight's dtype."""
    floats = batch.as_leaves(torch.float32)
    with torch.no_grad():
        return functional.linear(floats.hidden, floats.weight, floats.bias).to(batch.weight.dtype)


def exactly_from(logits, batch, upstream=1.0, **options):
    """Return the exact loss of these logits, and the gradients that follow from it."""
    loss, grad = exact(logits.double(), batch.target, upstream, **options)
    wide = batch.as_leaves(torch.float64)
    product = functional.linear(wide.hidden, wide.weight, wide.bias)
    return loss, torch.autograd.grad(product, wide.tensors(), grad)


def narrow_dtypes(device):
    return [BFLOAT16, torch.float16] if device.type == "cuda" else [BFLOAT16]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("chunk_rows", [None, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_16_bit_logits_are_rounded_once(device, reduction, chunk_rows, bias):
    for dtype in narrow_dtypes(device):
        batch = head(device, dtype, bias=bias)
        options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 1e-3}
        loss = batch.loss(logits_dtype=dtype, chunk_rows=chunk_rows, **options)
        upstream = 0.25 if reduction != "none" else torch.linspace(0.1, 0.5, len(loss)).to(device)
        expected, grads = exactly_from(rounded_logits(batch), batch, upstream, **options)
        assert loss.dtype == torch.float32
        assert off(loss, expected) <= 1e-3  # a few logits may be rounded to their other neighbour
        for grad, right in zip(batch.grads(loss, upstream), grads, strict=True):
            assert off(grad, right) <= 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [0, 1])
def test_16_bit_logits_of_few_rows(device, rows):
    batch = head(device, BFLOAT16, rows=rows)
    loss = batch.loss(logits_dtype=BFLOAT16, reduction="sum")
    expected, grads = exactly_from(rounded_logits(batch), batch, reduction="sum")
    assert off(loss, expected) <= 1e-3
    for grad, right in zip(batch.grads(loss), grads, strict=True):
        assert off(grad, right) <= 2 * TOLERANCE[BFLOAT16]


def test_16_bit_logits_are_further_from_the_exact_loss_than_float32_ones(device):
    batch = head(device, BFLOAT16, rows=300, features=64, classes=500)
    expected = exactly(batch, reduction="none").loss
    errors = [
        off(batch.loss(logits_dtype=dtype, reduction="none"), expected)
        for dtype in (BFLOAT16, torch.float32)
    ]
    assert errors[0] > 1e-4
    assert errors[1] < 1e-6


def test_metrics_are_those_of_the_rounded_logits(device):
    batch = head(device, BFLOAT16)
    _, metrics = batch.loss(logits_dtype=BFLOAT16, return_metrics=True)
    logits = rounded_logits(batch).double()
    assert off(metrics.lse, logits.logsumexp(-1)) <= 1e-3
    same = metrics.argmax == logits.argmax(-1)
    assert same.sum() >= len(same) - 1


def test_logits_have_the_products_dtype_on_a_gpu_and_float32_on_a_cpu_by_default(device):
    batch = head(device, BFLOAT16)
    default = BFLOAT16 if device.type == "cuda" else torch.float32
    results = []
    for logits_dtype in (None, default):
        loss = ampfuse.linear_cross_entropy(
            batch.hidden, batch.weight, batch.target, batch.bias, logits_dtype=logits_dtype
        )
        results.append([loss, *batch.grads(loss)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_logits_of_autocast_may_have_its_dtype(device):
    batch = head(device, torch.float32, bias=False)
    with torch.autocast(device.type, BFLOAT16):
        loss = batch.loss(logits_dtype=BFLOAT16)
    narrow = batch.as_leaves(BFLOAT16)
    assert torch.equal(loss, narrow.loss(logits_dtype=BFLOAT16))


@pytest.mark.parametrize(
    ("dtype", "wrong", "expected"),
    [
        (BFLOAT16, torch.float16, "bfloat16 or float32 for products of bfloat16, got float16"),
        (BFLOAT16, torch.float64, "bfloat16 or float32 for products of bfloat16, got float64"),
        (torch.float32, BFLOAT16, "expected float32 for products of float32, got bfloat16"),
        (torch.float64, torch.float32, "expected float64 for products of float64, got float32"),
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
    with pytest.raises(TypeError, match="logits_dtype: expected float32 with a process group"):
        torch.ops.ampfuse.linear_cross_entropy(
            batch.hidden,
            batch.weight,
            batch.target,
            group="0",
            vocab_shard=[1, 0, 101],
            logits_dtype=BFLOAT16,
        )


def test_opcheck_with_16_bit_logits(device):
    sample = list(forward(BFLOAT16, device, 8))
    sample[13] = BFLOAT16
    torch.library.opcheck(overload("linear_cross_entropy_forward"), tuple(sample))


def test_compiled_call_gives_the_same_bits(device):
    batch = head(device, BFLOAT16)
    compiled = torch.compile(
        lambda *tensors: ampfuse.linear_cross_entropy(*tensors, logits_dtype=BFLOAT16),
        fullgraph=True,
    )
    loss = compiled(batch.hidden, batch.weight, batch.target, batch.bias)
    assert torch.equal(loss, batch.loss(logits_dtype=BFLOAT16))


def test_module_passes_its_logits_dtype(device):
    module = ampfuse.LinearCrossEntropyLoss(
        24, 101, logits_dtype=BFLOAT16, device=device, dtype=BFLOAT16
    )
    batch = head(device, BFLOAT16, bias=False)
    batch.weight = module.linear.weight
    assert torch.equal(module(batch.hidden, batch.target), batch.loss(logits_dtype=BFLOAT16))
    assert "logits_dtype=torch.bfloat16" in repr(module)


def test_modules_that_were_pickled_without_logits_dtype_have_the_default(device):
    module = ampfuse.LinearCrossEntropyLoss(24, 101, device=device)
    del module.__dict__["logits_dtype"]
    batch = head(device, torch.float32)
    assert module(batch.hidden, batch.target).isfinite()


def test_16_bit_logits_need_no_more_memory_than_float32_ones(device):
    batch = head(device, BFLOAT16, rows=512, features=32, classes=4096, bias=False)

    def bytes_with(dtype):
        options = {"chunk_rows": 256, "logits_dtype": dtype}
        return extra_peak(device, lambda: batch.loss(**options).backward())

    few = 2**17
    saved = 256 * 4096 * (4 if device.type == "cuda" else 0)  # a CPU rounds float32 products
    bytes_with(BFLOAT16)  # allocates workspaces
    assert bytes_with(BFLOAT16) <= bytes_with(torch.float32) - saved + few + 4 * 2**20


def test_infinite_and_nan_logits(device):
    batch = head(device, BFLOAT16, bias=True)
    with torch.no_grad():
        batch.bias[7] = -torch.inf
    options = {"logits_dtype": BFLOAT16, "reduction": "none"}
    loss = batch.loss(**options)
    assert torch.equal(loss.isinf(), batch.target == 7)
    with torch.no_grad():
        batch.bias[7] = torch.nan
    assert torch.equal(batch.loss(**options).isnan(), batch.target != -100)


def test_float32_logits_give_exact_results_for_16_bit_tensors(device):
    check(head(device, BFLOAT16), label_smoothing=0.1)
