"""Tests of cross_entropy for images, whose classes are far apart in memory and are not copied."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, relatively_off, ulps_off
from harness.memory import extra_peak as peak

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
# Positions: half a tile of 32, a tile and one more, and several tiles, in one dimension or two.
# Classes: one, a few, and more than the 128 up to which a CPU takes contiguous rows by tile.
SHAPES = [(3, 1, 16), (2, 5, 33), (2, 21, 7, 15), (1, 150, 4, 20), (3, 2, 64)]
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def batch(device, shape, dtype=torch.float32, scale=4.0):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(shape, generator=generator) * scale).to(device, dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator).to(device)
    target.view(-1)[::5] = -100
    return logits.requires_grad_(), target


def weights(device, classes):
    return torch.rand(classes, generator=torch.Generator().manual_seed(2)).to(device)


def of_rows(logits, target, upstream, **options):
    """Return loss and gradient of a copy with contiguous rows. Other tests check these."""
    rows = logits.detach().movedim(1, -1).contiguous().movedim(-1, 1).requires_grad_()
    loss = ampfuse.cross_entropy(rows, target, **options)
    return loss, torch.autograd.grad(loss, rows, upstream.expand(loss.shape))[0]


@pytest.mark.sanitizer
@EVERY_SHAPE
@EVERY_DTYPE
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_loss_and_gradient_are_the_exact_ones_rounded(device, shape, dtype, reduction):
    logits, target = batch(device, shape, dtype)
    weight = weights(device, shape[1])
    scale = torch.tensor(1024.0, device=device)

    loss = ampfuse.cross_entropy(
        logits,
        target,
        weight,
        reduction=reduction,
        grad_scale=None if reduction == "none" else scale,
    )
    upstream = scale
    if reduction == "none":
        upstream = torch.rand(target.shape, device=device).to(loss.dtype)
    loss.backward(upstream.to(loss.dtype))

    expected, gradient = exact(logits, target, upstream, reduction=reduction, weight=weight)
    assert relatively_off(loss, expected) <= 1e-6 or shape[1] == 1
    if dtype == torch.float64:
        torch.testing.assert_close(logits.grad, gradient, rtol=1e-12, atol=1e-12)
    else:
        assert ulps_off(logits.grad, gradient) <= ULPS
    assert (logits.grad.movedim(1, -1)[target == -100] == 0).all()


EVERYTHING = {
    "label smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 10.0},
    "all of it": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 10.0},
}


@EVERY_SHAPE
@EVERY_DTYPE
@pytest.mark.parametrize("options", EVERYTHING.values(), ids=list(EVERYTHING))
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("kind", ["indices", "probabilities", "half probabilities"])
def test_results_with_any_option_equal_those_of_contiguous_rows(
    device, shape, dtype, options, reduction, kind
):
    logits, target = batch(device, shape, dtype)
    if kind != "indices":
        target = torch.rand(shape, device=device).softmax(1)
        target = target.half() if kind == "half probabilities" else target
    options = {**options, "reduction": reduction, "weight": weights(device, shape[1])}
    upstream = torch.tensor(8.0, device=device, dtype=torch.promote_types(dtype, torch.float32))

    loss = ampfuse.cross_entropy(
        logits, target, grad_scale=None if reduction == "none" else upstream, **options
    )
    loss.backward(upstream.expand(loss.shape))

    expected, gradient = of_rows(logits, target, upstream, **options)
    torch.testing.assert_close(loss, expected, rtol=2e-6, atol=2e-6)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        logits.grad, gradient, rtol=max(2 * eps, 1e-13), atol=max(2 * eps, 1e-13)
    )


@EVERY_DTYPE
def test_metrics_of_positions_are_exact(device, dtype):
    logits, target = batch(device, (2, 21, 7, 15), dtype)
    logits.data.view(-1)[::9] = 1.0  # some are equal
    logits.data[0, :, 0, 0] = torch.nan

    loss, metrics = ampfuse.cross_entropy(logits, target, return_metrics=True, reduction="none")

    x = logits.detach().double()
    log_p = x.log_softmax(1)
    close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(metrics.lse.double(), x.logsumexp(1), **close)
    torch.testing.assert_close(metrics.entropy.double(), -(log_p.exp() * log_p).sum(1), **close)
    assert torch.equal(metrics.argmax, x.argmax(1))
    assert torch.equal(metrics.correct, (x.argmax(1) == target) & (target != -100))
    plain = ampfuse.cross_entropy(logits, target, reduction="none")
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=1e-6, equal_nan=True)


@EVERY_DTYPE
def test_positions_with_infinities_and_nans_give_torchs_results(device, dtype):
    infinity = torch.inf
    rows = torch.tensor(
        [
            [-infinity, 2.0, -infinity],
            [-infinity, 2.0, 1.0],
            [-infinity] * 3,
            [infinity, 2.0, 1.0],
            [1.0, infinity, 1.0],
            [torch.nan, 1.0, 1.0],
            [1.0, torch.nan, 1.0],
        ],
        dtype=dtype,
        device=device,
    )
    logits = rows.t()[None].repeat(1, 1, 3).contiguous().requires_grad_()
    target = torch.ones(1, logits.shape[2], dtype=torch.int64, device=device)

    loss = ampfuse.cross_entropy(logits, target, reduction="none")
    loss.backward(torch.ones_like(loss))

    expected, gradient = exact(logits, target, reduction="none")
    assert torch.allclose(loss.double(), expected, equal_nan=True)
    assert torch.allclose(logits.grad.double(), gradient, rtol=1e-2, equal_nan=True)


def test_gradient_of_an_ignored_position_is_zero_even_for_nan_logits(device):
    logits = torch.full((1, 3, 40), torch.nan, device=device)
    logits[:, :, 0] = 0
    logits.requires_grad_()
    target = torch.full((1, 40), -100, device=device)
    target[0, 0] = 1
    loss = ampfuse.cross_entropy(logits, target)
    loss.backward()
    assert loss.item() == pytest.approx(torch.log(torch.tensor(3.0)).item())
    assert (logits.grad[:, :, 1:] == 0).all()


@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_error_names_the_target_that_is_out_of_range_and_its_row(bad):
    logits, target = batch(torch.device("cpu"), (2, 3, 20))
    target[1, 7] = bad
    with pytest.raises(IndexError, match=rf"Target {bad} is out of bounds: in row 27"):
        ampfuse.cross_entropy(logits, target)


VIEWS = {
    "a part of a batch's entries": lambda x: x[1:],
    "every second entry": lambda x: x[::2],
    "a part of classes": lambda x: x[:, 1:5],
    "a part of the positions": lambda x: x[..., 3:],
    "every second position": lambda x: x[..., ::2],
    "one entry for all": lambda x: x[:1].expand(x.shape),
    "one position for all": lambda x: x[..., :1].expand(x.shape),
    "transposed positions": lambda x: x.transpose(-1, -2),
    "rows in one piece": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=list(VIEWS))
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_views_of_a_batch_give_torchs_loss_and_gradient(device, view, reduction):
    whole, _ = batch(device, (4, 7, 6, 22))
    logits = view(whole)
    target = torch.randint(logits.shape[1], (logits.shape[0], *logits.shape[2:]), device=device)

    loss = ampfuse.cross_entropy(logits, target, reduction=reduction)
    upstream = torch.rand(loss.shape, device=device)
    (grad,) = torch.autograd.grad(loss, whole, upstream)

    expected = torch.nn.functional.cross_entropy(logits, target, reduction=reduction)
    (gradient,) = torch.autograd.grad(expected, whole, upstream)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_results_of_a_position_do_not_depend_on_other_positions(device, dtype, reduction):
    logits, target = batch(device, (3, 21, 100), dtype)
    scale = torch.ones((), device=device)
    options = {"reduction": reduction, "denominator": scale if reduction == "mean" else None}
    whole = ampfuse.cross_entropy(logits, target, **options)
    (grad,) = torch.autograd.grad(whole.sum(), logits)
    for entry, first in ((0, 0), (1, 17), (2, 53)):
        part = (slice(entry, entry + 1), slice(first, first + 40))
        alone = logits[part[0], :, part[1]].detach().clone().requires_grad_()
        loss = ampfuse.cross_entropy(alone, target[part], **options)
        (of_part,) = torch.autograd.grad(loss.sum(), alone)
        assert torch.equal(of_part, grad[part[0], :, part[1]])
        if reduction == "none":
            assert torch.equal(loss, whole[part])


def test_results_do_not_depend_on_the_number_of_threads(set_threads):
    logits, target = batch(torch.device("cpu"), (2, 21, 90, 90))
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        loss = ampfuse.cross_entropy(logits, target)
        results.append((loss, *torch.autograd.grad(loss, logits)))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(grad, results[0][1])


# Logits are read in place if a class has at least max(16, classes / 16) positions. The shapes have
# the most classes for 16 positions, one class more, one position too few, far too many classes, and
# enough positions for many classes.
EDGES = [(2, 256, 16), (2, 257, 16), (2, 3, 15), (1, 4000, 16), (1, 5000, 400)]


@pytest.mark.parametrize("shape", EDGES, ids=str)
def test_results_are_exact_whether_logits_are_copied_or_not(device, shape):
    logits, target = batch(device, shape)
    loss = ampfuse.cross_entropy(logits, target)
    loss.backward()
    expected, gradient = exact(logits, target)
    assert relatively_off(loss, expected) <= 1e-6
    assert ulps_off(logits.grad, gradient) <= ULPS


@pytest.mark.parametrize("softcap", [1.0, 30.0])
@pytest.mark.parametrize("shape", [(4, 10, 40), (4, 10)], ids=str)
def test_gradient_of_the_target_keeps_its_digits_under_a_softcap(device, softcap, shape):
    logits, target = batch(device, shape, scale=1.0)
    loss = ampfuse.cross_entropy(logits, target, reduction="sum", softcap=softcap)
    loss.backward()
    _, gradient = exact(logits, target, reduction="sum", softcap=softcap)
    at = target.clamp(min=0).unsqueeze(1)
    is_target = target.unsqueeze(1) >= 0
    of_targets = (logits.grad.gather(1, at)[is_target], gradient.gather(1, at)[is_target])
    # A GPU's tanh may be off by 2 ulps.
    assert ulps_off(*of_targets) <= (1.5 if device.type == "cpu" else 3.5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_the_gradient_is_allocated(device, dtype):
    logits, target = batch(device, (4, 21, 128, 128), dtype)
    size = logits.numel() * logits.element_size()
    loss_of = ampfuse.cross_entropy
    assert peak(device, lambda: loss_of(logits, target).backward()) <= 1.05 * size
    with torch.no_grad():
        assert peak(device, lambda: loss_of(logits, target)) <= 0.05 * size + 2**16
