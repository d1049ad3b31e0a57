"""Tests of losses and gradients of linear_cross_entropy with all options, against float64."""

from dataclasses import replace

import pytest
import torch
from linear_reference import (
    EVERY_DTYPE,
    EVERY_REDUCTION,
    OPTIONS,
    WAYS,
    Head,
    check,
    head,
    off,
    with_options,
)

NARROW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
# Rows of few classes are computed in tiles of many rows, others one by one.
CLASSES = {"tiles": 101, "rows": 301}


@pytest.mark.vectorised
@EVERY_DTYPE
@EVERY_REDUCTION
def test_results_of_chunks_of_any_number_of_rows_are_exact(device, dtype, reduction):
    # One row at a time, three whole chunks, a shorter last chunk, a chunk with room for more rows,
    # and the default.
    for chunk_rows in (1, 7, 8, 64, None):
        check(head(device, dtype), reduction=reduction, chunk_rows=chunk_rows)
    check(head(device, dtype, bias=False), reduction=reduction, chunk_rows=8)
    if reduction == "mean":
        check(head(device, dtype), chunk_rows=8, denominator=7.1)


@pytest.mark.vectorised
@EVERY_DTYPE
@pytest.mark.parametrize("name", OPTIONS)
def test_results_with_any_option_are_exact(device, dtype, name):
    for classes in CLASSES.values():
        batch, options = with_options(head(device, dtype, classes=classes), name)
        for how in WAYS.values():
            check(batch, **how, **options)


@pytest.mark.parametrize("target_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_probabilities_may_have_any_floating_dtype(device, target_dtype):
    target = torch.rand(21, 101, generator=torch.Generator().manual_seed(5)).softmax(1)
    target = target.to(device, target_dtype)
    check(replace(head(device, torch.float32), target=target), chunk_rows=8)


@pytest.mark.parametrize("target_dtype", [torch.int32, torch.uint8])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_targets_may_be_int32_or_uint8(device, target_dtype, ignore_index):
    for dtype in (torch.float32, torch.bfloat16):
        batch = head(device, dtype)
        batch.target = batch.target.clamp(min=0).to(target_dtype)
        for chunks in ({"chunk_rows": 8}, {"chunk_classes": 2}):
            check(batch, ignore_index=ignore_index, **chunks)


@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 1), ()])
def test_hidden_states_may_have_any_shape(device, shape):
    flat = head(device, torch.bfloat16, rows=torch.Size(shape).numel())
    hidden = flat.hidden.detach().reshape(*shape, 24).requires_grad_()
    batch = replace(flat, hidden=hidden, target=flat.target.reshape(shape))
    for how in WAYS.values():
        check(batch, **how)
        loss, metrics = batch.loss(return_metrics=True, **how)
        assert loss.shape == (shape if how["reduction"] == "none" else ()), how
        assert all(metric.shape == shape for metric in metrics), how


def test_target_of_a_single_row_may_have_one_dimension(device):
    batch = head(device, torch.float32, rows=1)
    loss = replace(batch, hidden=batch.hidden.detach()[0]).loss()
    torch.testing.assert_close(loss, batch.loss())


@EVERY_DTYPE
def test_tensors_may_be_strided(device, dtype):
    flat = head(device, dtype)
    wide = torch.zeros(21, 50, device=device, dtype=dtype)
    wide[:, 1:49:2] = flat.hidden.detach()
    hidden = wide[:, 1:49:2].requires_grad_()
    weight = flat.weight.detach().t().contiguous().t().requires_grad_()
    bias = torch.stack([flat.bias.detach()] * 2, 1)[:, 0].requires_grad_()
    target = torch.stack([flat.target] * 2, 1)[:, 0]
    assert not hidden.is_contiguous()
    assert not weight.is_contiguous()
    check(Head(hidden, weight, bias, target), chunk_rows=8)
    check(Head(hidden, weight, bias, target), chunk_rows=8, reduction="none")
    check(Head(hidden, weight, bias, target), chunk_classes=32)
    expanded = flat.hidden.detach()[:1].expand(21, 24).requires_grad_()
    check(Head(expanded, weight, bias, target), chunk_rows=8)


@pytest.mark.sanitizer
@pytest.mark.vectorised
@EVERY_DTYPE
def test_any_number_of_classes_gives_exact_results(device, dtype):
    # One class; two; neighbours of 64, at which rows are aligned; more classes than tiles have.
    for classes in (1, 2, 63, 64, 257, 1031):
        check(head(device, dtype, rows=9, classes=classes), chunk_rows=4)


@NARROW
def test_any_number_of_features_gives_exact_results(device, dtype):
    # Products add up pairs of features, in blocks of 1024.
    for features in (1, 2, 3, 17, 1023, 1025, 2050):
        for rows in (1, 50):
            batch = head(device, dtype, rows=rows, features=features, classes=59)
            batch.weight = (batch.weight.detach() / features**0.5).requires_grad_()
            check(batch, chunk_rows=33)


@pytest.mark.vectorised
@NARROW
def test_classes_of_several_blocks_give_exact_results(device, dtype):
    # CPUs multiply blocks of 8192 classes. For so many float32 terms the products of some libraries
    # have an error of 4e-6, also in eager torch.
    check(head(device, dtype, rows=5, features=8, classes=20011), chunk_rows=2, tolerance=4)


@EVERY_DTYPE
def test_logits_equal_the_bias_for_zero_features(device, dtype):
    check(head(device, dtype, features=0))
    batch = head(device, dtype, features=0, bias=False)
    torch.testing.assert_close(batch.loss(), torch.full_like(batch.loss(), 101.0).log())


@pytest.mark.sanitizer
@EVERY_DTYPE
def test_empty_batch_has_a_nan_mean_and_zero_gradients(device, dtype):
    batch = head(device, dtype, rows=0)
    for how in WAYS.values():
        loss = batch.loss(**how)
        assert loss.shape == ((0,) if how["reduction"] == "none" else ()), how
        assert loss.isnan() if how["reduction"] == "mean" else (loss == 0).all(), how
        for tensor, grad in zip(batch.tensors(), batch.grads(loss), strict=True):
            assert grad.shape == tensor.shape, how
            assert (grad == 0).all(), how
    assert batch.loss(denominator=8.0) == 0


@EVERY_DTYPE
def test_batch_of_ignored_rows_has_a_nan_mean_but_otherwise_zeros(device, dtype):
    batch = head(device, dtype)
    batch.target.fill_(-100)
    for how in WAYS.values():
        if how["reduction"] == "mean":
            assert batch.loss(**how).isnan(), how
            how = how | {"denominator": 4.0}
        loss = batch.loss(**how)
        assert (loss == 0).all(), how
        assert all((grad == 0).all() for grad in batch.grads(loss)), how


@pytest.mark.vectorised
@EVERY_DTYPE
@pytest.mark.parametrize("classes", CLASSES.values(), ids=list(CLASSES))
def test_metrics_equal_those_of_the_exact_logits(device, dtype, classes):
    batch = head(device, dtype, classes=classes)
    with torch.no_grad():  # equal logits, in two tiles: the first one counts
        # No order of summation rounds the float64 products of these numbers. Libraries choose it by
        # the place in the matrix.
        batch.hidden.copy_(batch.hidden.bfloat16())
        batch.weight.copy_(batch.weight.bfloat16())
        batch.bias[3] += 4
        batch.weight[77], batch.bias[77] = batch.weight[3], batch.bias[3]
    logits = batch.exact_logits()
    best = logits.argmax(1)
    assert (best == 3).any()
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for chunks in ({"chunk_rows": 8}, {"chunk_classes": 20}):
        loss, metrics = batch.loss(return_metrics=True, **chunks)
        assert off(metrics.lse, logits.logsumexp(1)) <= tolerance, chunks
        assert off(metrics.entropy, entropy) <= tolerance * 4, chunks
        assert torch.equal(metrics.argmax, best), chunks
        assert torch.equal(metrics.correct, (best == batch.target) & (batch.target != -100)), chunks
        assert torch.equal(loss, batch.loss(**chunks)), chunks
        assert not any(metric.requires_grad for metric in metrics)


def test_correct_compares_argmax_with_the_most_probable_class(device):
    batch = head(device, torch.float32)
    batch.target = torch.eye(101, device=device)[batch.target.clamp(min=0)]
    _, metrics = batch.loss(return_metrics=True)
    assert torch.equal(metrics.correct, metrics.argmax == batch.target.argmax(1))


@pytest.mark.vectorised
@EVERY_REDUCTION
def test_results_are_exact_with_more_threads_than_rows(set_threads, reduction):
    """Threads share a row, unless its 16-bit gradient overwrites its float32 logits."""
    set_threads(4)
    for _ in range(5):
        batch = head(torch.device("cpu"), torch.bfloat16, rows=3, classes=40000)
        check(batch, reduction=reduction, softcap=5.0)


def test_losses_have_the_same_bits_with_and_without_gradients(device):
    batch = head(device, torch.bfloat16, 300, 16, 3000)
    for how in WAYS.values():
        loss = batch.loss(**how)
        with torch.no_grad():
            assert torch.equal(batch.loss(**how), loss), how
