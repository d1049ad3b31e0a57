"""Tests of losses and gradients of linear_cross_entropy with all options, against float64."""

import ampfuse
import pytest
import torch
from harness.memory import extra_peak
from linear_reference import Head, check, exactly, head, off
from torch.nn import functional

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
REDUCTIONS = ["mean", "sum", "none"]
EVERY_REDUCTION = pytest.mark.parametrize("reduction", REDUCTIONS)


@EVERY_DTYPE
@EVERY_REDUCTION
@pytest.mark.parametrize("bias", [True, False])
# One row at a time, a shorter last chunk, three whole chunks, a chunk with room for more rows, and
# the default.
@pytest.mark.parametrize("chunk_rows", [1, 8, 7, 64, None])
def test_loss_and_gradients_are_the_exact_ones(device, dtype, reduction, bias, chunk_rows):
    check(head(device, dtype, bias=bias), reduction=reduction, chunk_rows=chunk_rows)


OPTIONS = {
    "class weights": {"class_weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "weights and smoothing": {"class_weight": True, "label_smoothing": 0.2},
    "z-loss": {"z_loss": 1e-3},
    "softcap": {"softcap": 3.0},
    "another ignored class": {"ignore_index": 5},
    "all": {"class_weight": True, "label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 4.0},
}


def with_class_weight(options, batch):
    classes = batch.weight.shape[0]
    if options.get("class_weight"):
        generator = torch.Generator().manual_seed(3)
        weight = torch.rand(classes, generator=generator).to(batch.weight.device)
        return options | {"class_weight": weight}
    return dict(options)


@EVERY_DTYPE
@EVERY_REDUCTION
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_loss_and_gradients_with_any_option_are_exact(device, dtype, reduction, options):
    batch = head(device, dtype)
    if "ignore_index" in options:
        batch.target.clamp_(min=0)
        batch.target[::4] = 5
    check(batch, reduction=reduction, chunk_rows=8, **with_class_weight(options, batch))


@EVERY_DTYPE
@EVERY_REDUCTION
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_targets_may_be_probabilities(device, dtype, reduction, smoothing):
    batch = head(device, dtype)
    logits = torch.randn(21, 101, generator=torch.Generator().manual_seed(5))
    batch.target = logits.softmax(1).to(device)
    check(batch, reduction=reduction, chunk_rows=8, label_smoothing=smoothing)


@pytest.mark.parametrize("target_dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_probabilities_may_have_any_floating_dtype(device, target_dtype):
    batch = head(device, torch.float32)
    target = torch.rand(21, 101, generator=torch.Generator().manual_seed(5)).softmax(1)
    batch.target = target.to(device, target_dtype)
    check(batch, chunk_rows=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target_dtype", [torch.int32, torch.uint8])
def test_targets_may_be_int32_or_uint8(device, dtype, target_dtype):
    batch = head(device, dtype)
    batch.target = batch.target.clamp(min=0).to(target_dtype)
    check(batch, chunk_rows=8, ignore_index=-100)


@EVERY_DTYPE
@EVERY_REDUCTION
@pytest.mark.parametrize("shape", [(2, 3, 4), (5, 1), ()])
def test_hidden_states_may_have_any_shape(device, dtype, reduction, shape):
    rows = int(torch.tensor(shape).prod()) if shape else 1
    flat = head(device, dtype, rows=rows)
    batch = Head(
        flat.hidden.detach().reshape(*shape, 24).requires_grad_(),
        flat.weight,
        flat.bias,
        flat.target.reshape(shape),
    )
    check(batch, reduction=reduction, chunk_rows=3)
    loss, metrics = batch.loss(reduction=reduction, return_metrics=True)
    assert loss.shape == (shape if reduction == "none" else ())
    assert all(metric.shape == shape for metric in metrics)


def test_target_of_a_single_row_may_have_one_dimension(device):
    batch = head(device, torch.float32, rows=1)
    hidden = batch.hidden.detach()[0]
    loss = ampfuse.linear_cross_entropy(hidden, batch.weight, batch.target, batch.bias)
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
    expanded = flat.hidden.detach()[:1].expand(21, 24).requires_grad_()
    check(Head(expanded, weight, bias, target), chunk_rows=8)


@pytest.mark.sanitizer
@EVERY_DTYPE
@pytest.mark.parametrize("classes", [1, 2, 63, 64, 257, 1031])
def test_any_number_of_classes_gives_exact_results(device, dtype, classes):
    check(head(device, dtype, rows=9, classes=classes), chunk_rows=4)


# Products add up pairs of features, in blocks of 1024.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("features", [1, 2, 3, 17, 1023, 1025, 2050])
@pytest.mark.parametrize("rows", [1, 50])
def test_any_number_of_features_gives_exact_results(device, dtype, features, rows):
    batch = head(device, dtype, rows=rows, features=features, classes=59)
    batch.weight = (batch.weight.detach() / features**0.5).requires_grad_()
    check(batch, chunk_rows=33)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_classes_of_several_blocks_give_exact_results(device, dtype):
    # CPUs multiply blocks of 8192 classes. For so many float32 terms the products of some libraries
    # have an error of 4e-6, also in eager torch.
    check(head(device, dtype, rows=5, features=8, classes=20011), chunk_rows=2, tolerance=4)


@EVERY_DTYPE
def test_logits_equal_the_bias_for_zero_features(device, dtype):
    check(head(device, dtype, features=0))
    batch = head(device, dtype, features=0, bias=False)
    torch.testing.assert_close(batch.loss(), torch.full_like(batch.loss(), 101.0).log())


@EVERY_DTYPE
@EVERY_REDUCTION
def test_empty_batch_has_a_nan_mean_and_zero_gradients(device, dtype, reduction):
    batch = head(device, dtype, rows=0)
    loss = batch.loss(reduction=reduction)
    if reduction == "mean":
        assert loss.isnan()
    else:
        assert loss.shape == ((0,) if reduction == "none" else ())
        assert (loss == 0).all()
    for tensor, grad in zip(batch.tensors(), batch.grads(loss), strict=True):
        assert grad.shape == tensor.shape
        assert (grad == 0).all()


@pytest.mark.sanitizer
def test_empty_micro_batch_has_zero_loss_with_a_denominator(device):
    batch = head(device, torch.float32, rows=0)
    assert batch.loss(denominator=8.0) == 0


@EVERY_DTYPE
def test_batch_of_ignored_rows_has_a_nan_mean_but_otherwise_zeros(device, dtype):
    batch = head(device, dtype)
    batch.target.fill_(-100)
    assert batch.loss(chunk_rows=8).isnan()
    for options in ({"reduction": "sum"}, {"reduction": "none"}, {"denominator": 4.0}):
        loss = batch.loss(chunk_rows=8, **options)
        assert (loss == 0).all()
        assert all((grad == 0).all() for grad in batch.grads(loss))


@EVERY_DTYPE
def test_metrics_equal_those_of_the_exact_logits(device, dtype):
    batch = head(device, dtype)
    loss, metrics = batch.loss(return_metrics=True, chunk_rows=8)
    wide = batch.as_leaves(torch.float64)
    logits = functional.linear(wide.hidden, wide.weight, wide.bias).detach()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    assert off(metrics.lse, logits.logsumexp(1)) <= tolerance
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert off(metrics.entropy, entropy) <= tolerance * 4
    assert torch.equal(metrics.argmax, logits.argmax(1))
    right = (logits.argmax(1) == batch.target) & (batch.target != -100)
    assert torch.equal(metrics.correct, right)
    assert torch.equal(loss, batch.loss(chunk_rows=8))
    assert not any(metric.requires_grad for metric in metrics)


def test_correct_compares_argmax_with_the_most_probable_class(device):
    batch = head(device, torch.float32)
    batch.target = torch.eye(101, device=device)[batch.target.clamp(min=0)]
    _, metrics = batch.loss(return_metrics=True)
    assert torch.equal(metrics.correct, metrics.argmax == batch.target.argmax(1))


@EVERY_DTYPE
def test_micro_batches_with_one_denominator_add_up(device, dtype):
    batch = head(device, dtype, rows=24)
    count = float((batch.target != -100).sum())
    whole = exactly(batch)
    sums = [torch.zeros_like(t, dtype=torch.float64) for t in batch.tensors()]
    loss = 0
    for rows in torch.arange(24, device=device).split(5):
        part = Head(batch.hidden[rows], batch.weight, batch.bias, batch.target[rows])
        of_part = part.loss(denominator=count)
        loss = loss + of_part.item()
        for total, grad in zip(sums, torch.autograd.grad(of_part, batch.tensors()), strict=True):
            total += grad
    assert loss == pytest.approx(whole.loss.item(), rel=1e-6)
    for total, right in zip(sums, whole.grads, strict=True):
        assert off(total, right) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_equals_cross_entropy_of_the_logits(device, dtype):
    batch = head(device, dtype)
    wide = batch.as_leaves(torch.float32)
    logits = functional.linear(wide.hidden, wide.weight, wide.bias)
    expected = ampfuse.cross_entropy(logits, batch.target)
    torch.testing.assert_close(batch.loss(), expected, rtol=1e-6, atol=1e-6)


@EVERY_REDUCTION
def test_results_are_exact_with_more_threads_than_rows(set_threads, reduction):
    """Threads share a row, unless its 16-bit gradient overwrites its float32 logits."""
    set_threads(4)
    for _ in range(5):
        batch = head(torch.device("cpu"), torch.bfloat16, rows=3, classes=40000)
        check(batch, reduction=reduction, softcap=5.0)


@pytest.mark.parametrize(("classes", "rows"), [(50257, 320), (200_000, 128)])
def test_default_chunk_on_a_cpu_has_64_mib_of_logits_or_128_rows(classes, rows):
    device = torch.device("cpu")
    batch = head(device, torch.bfloat16, 400, 4, classes, bias=False)

    @torch.no_grad()
    def held(**options):
        return extra_peak(device, lambda: batch.loss(**options))

    a_row = held(chunk_rows=rows + 1) - held(chunk_rows=rows)
    assert a_row >= 4 * classes
    assert abs(held() - held(chunk_rows=rows)) < a_row / 2


@EVERY_REDUCTION
def test_losses_have_the_same_bits_with_and_without_gradients(device, reduction):
    batch = head(device, torch.bfloat16, 300, 16, 3000)
    loss = batch.loss(reduction=reduction, chunk_rows=64)
    with torch.no_grad():
        assert torch.equal(batch.loss(reduction=reduction, chunk_rows=64), loss)
