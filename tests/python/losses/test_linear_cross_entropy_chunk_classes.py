"""Tests of linear_cross_entropy that takes all rows, and some of the classes at a time."""

from dataclasses import replace

import ampfuse
import pytest
import torch
from harness.memory import extra_peak
from linear_reference import check, head
from op_overloads import overload
from torch.nn import functional

BFLOAT16 = torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32, BFLOAT16, torch.float16])


@DTYPES
@pytest.mark.parametrize("chunk_classes", [1, 32, 100, 101, 1000])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_and_gradients_are_exact(device, dtype, chunk_classes, bias, reduction):
    batch = head(device, dtype, bias=bias)
    check(batch, chunk_classes=chunk_classes, reduction=reduction, upstream=0.5)


@DTYPES
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1, "z_loss": 1e-2},
        {"softcap": 3.0},
        {"class_weight": True, "label_smoothing": 0.1},
        {"denominator": 7.0},
    ],
    ids=lambda options: ", ".join(options),
)
def test_options_mean_the_same_as_without_tiles(device, dtype, options):
    batch = head(device, dtype)
    options = dict(options)
    if options.get("class_weight"):
        floats = torch.float64 if dtype == torch.float64 else torch.float32
        options["class_weight"] = torch.linspace(0.5, 2, 101, device=device, dtype=floats)
    check(batch, chunk_classes=32, **options)


@DTYPES
def test_targets_may_be_probabilities(device, dtype):
    floats = torch.float64 if dtype == torch.float64 else torch.float32
    target = torch.rand(21, 101, dtype=floats, device=device).softmax(-1)
    check(replace(head(device, dtype), target=target), chunk_classes=40, label_smoothing=0.1)


def test_metrics_are_those_of_all_classes(device):
    batch = head(device, torch.float32)
    batch.weight.data[77] = batch.weight.data[3]  # equal logits in two tiles: the first one counts
    results = [
        batch.loss(return_metrics=True, **options) for options in ({}, {"chunk_classes": 20})
    ]
    for one, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_targets_of_any_dtype_with_an_ignored_class(device, dtype, ignore_index):
    batch = head(device, torch.float32)
    target = batch.target.clamp(min=0)
    expected = batch_with(batch, target).loss(ignore_index=ignore_index)
    found = batch_with(batch, target.to(dtype)).loss(chunk_classes=2, ignore_index=ignore_index)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def batch_with(batch, target):
    return replace(batch, target=target)


@pytest.mark.sanitizer
def test_loss_is_that_of_chunks_of_rows_to_the_last_digits(device):
    batch = head(device, BFLOAT16, rows=300, classes=1000)
    losses, grads = [], []
    for options in ({"chunk_rows": 300}, {"chunk_classes": 256}):
        loss = batch.loss(**options)
        losses.append(loss.detach())
        grads.append(batch.grads(loss))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)


def test_float16_gradients_keep_their_digits_under_a_loss_scale(device):
    batch = head(device, torch.float16, rows=64, classes=3000)
    scale = torch.tensor(2.0**16, device=device)
    check(batch, chunk_classes=512, grad_scale=scale, upstream=scale)


@pytest.mark.parametrize("wanted", [("hidden",), ("weight",), ("bias",), ("hidden", "bias")])
def test_only_wanted_gradients_are_computed(device, wanted):
    batch = head(device, torch.float32)
    for name in ("hidden", "weight", "bias"):
        getattr(batch, name).requires_grad_(name in wanted)
    batch.loss(chunk_classes=32).backward()
    whole = head(device, torch.float32)
    whole.loss().backward()
    for name in ("hidden", "weight", "bias"):
        grad = getattr(batch, name).grad
        assert (grad is not None) == (name in wanted)
        if grad is not None:
            torch.testing.assert_close(grad, getattr(whole, name).grad, rtol=1e-5, atol=1e-6)


def test_without_gradients_the_loss_has_the_same_bits(device):
    batch = head(device, BFLOAT16)
    trained = batch.loss(chunk_classes=32)
    with torch.no_grad():
        assert torch.equal(batch.loss(chunk_classes=32), trained)


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(device, rows):
    check(head(device, torch.float32, rows=rows), chunk_classes=32, reduction="sum")


def test_a_batch_without_counted_rows_has_a_nan_mean_and_zero_gradients(device):
    batch = head(device, torch.float32)
    batch.target.fill_(-100)
    loss = batch.loss(chunk_classes=32)
    assert loss.isnan()
    for grad in batch.grads(batch.loss(chunk_classes=32, reduction="sum")):
        assert not grad.any()


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_nan_and_infinite_hidden_states_make_their_row_nan(device, value):
    batch = head(device, torch.float32, bias=False)
    with torch.no_grad():
        batch.hidden[0, 0] = float(value)
    loss = batch.loss(chunk_classes=32, reduction="sum")
    grad_hidden, grad_weight = batch.grads(loss)
    assert loss.isnan()
    assert grad_hidden[0].isnan().all()
    assert grad_hidden[1:].isfinite().all()
    assert grad_weight[:, 0].isnan().all()


def test_gradients_are_added_to_a_buffer(device):
    batch = head(device, BFLOAT16)
    buffers = [torch.ones(101, 24, device=device) for _ in range(2)]
    for options, buffer in zip(({}, {"chunk_classes": 32}), buffers, strict=True):
        batch.loss(accumulate_into=buffer, **options).backward()
    torch.testing.assert_close(*buffers, rtol=2**-7, atol=1e-5)


def test_autocast_converts_the_weight(device):
    batch = head(device, torch.float32, bias=False)
    with torch.autocast(device.type, BFLOAT16):
        loss = batch.loss(chunk_classes=32)
    narrow = batch.as_leaves(BFLOAT16)
    assert torch.equal(loss, narrow.loss(chunk_classes=32))
    assert all(grad.dtype == torch.float32 for grad in batch.grads(loss))


def test_strided_hidden_states_and_weights(device):
    batch = head(device, torch.float32)
    wide = torch.zeros(21, 48, device=device)
    wide[:, ::2] = batch.hidden.detach()
    strided = replace(
        batch,
        hidden=wide[:, ::2].requires_grad_(),
        weight=batch.weight.detach().t().contiguous().t().requires_grad_(),
    )
    torch.testing.assert_close(
        strided.loss(chunk_classes=32), batch.loss(chunk_classes=32), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_classes": 0}, "chunk_classes: expected at least 1, got 0"),
        ({"chunk_classes": 8, "chunk_rows": 8}, "and neither with chunk_rows"),
        ({"chunk_classes": 8, "reduction": "none"}, 'only allowed with reduction="mean" or "sum"'),
    ],
    ids=["none", "with chunk_rows", "per row"],
)
def test_invalid_combinations_are_refused(device, options, words):
    with pytest.raises(ValueError, match=words):
        head(device, torch.float32).loss(**options)


def test_module_takes_chunk_classes_and_shows_it(device):
    module = ampfuse.LinearCrossEntropyLoss(24, 101, chunk_classes=32, device=device)
    batch = head(device, torch.float32)
    expected = ampfuse.linear_cross_entropy(batch.hidden, module.linear.weight, batch.target)
    torch.testing.assert_close(module(batch.hidden, batch.target), expected)
    assert "chunk_classes=32" in repr(module)


@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16])
def test_logits_are_float32(device, dtype):
    batch = head(device, dtype)
    loss = ampfuse.linear_cross_entropy(
        batch.hidden, batch.weight, batch.target, batch.bias, chunk_classes=32
    )
    assert torch.equal(loss, batch.loss(chunk_classes=32))
    with pytest.raises(TypeError, match="expected float32 with a process group or chunk_classes"):
        batch.loss(chunk_classes=32, logits_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16])
def test_compiled_in_one_graph(device, dtype):
    batch = head(device, dtype)

    @torch.compile(fullgraph=True)
    def compiled(hidden, weight, bias):
        return ampfuse.linear_cross_entropy(hidden, weight, batch.target, bias, chunk_classes=32)

    loss = compiled(batch.hidden, batch.weight, batch.bias)
    eager = ampfuse.linear_cross_entropy(
        batch.hidden, batch.weight, batch.target, batch.bias, chunk_classes=32
    )
    assert torch.equal(loss, eager)
    for one, other in zip(batch.grads(loss), batch.grads(eager), strict=True):
        assert torch.equal(one, other)


def test_opcheck(device):
    batch = head(device, BFLOAT16)
    torch.library.opcheck(
        overload("linear_cross_entropy"),
        (batch.hidden, batch.weight, batch.target, batch.bias),
        {"chunk_classes": 32},
    )


def test_memory_is_that_of_one_tile_and_the_gradients(device):
    rows, features, classes, tile = 1024, 32, 8192, 256
    batch = head(device, BFLOAT16, rows=rows, features=features, classes=classes, bias=False)

    def step():
        loss = ampfuse.linear_cross_entropy(
            batch.hidden, batch.weight, batch.target, chunk_classes=tile
        )
        loss.backward()

    gradients = 2 * features * (rows + classes)
    logits = 6 * rows * tile
    sums = 4 * rows * features
    partials = 8 * 16 * rows * (classes // tile)
    # A CPU converts some of the weight to float32 for its products.
    few = 128 * rows + 4 * classes * features + 2**17
    assert extra_peak(device, step) <= gradients + logits + sums + partials + few


def test_the_result_is_the_exact_one_for_a_large_vocabulary(device):
    batch = head(device, torch.float32, rows=40, features=16, classes=50_257)
    logits = functional.linear(batch.hidden.double(), batch.weight.double(), batch.bias.double())
    expected = functional.cross_entropy(logits, batch.target)
    torch.testing.assert_close(batch.loss(chunk_classes=4096).double(), expected, rtol=1e-6, atol=0)
