"""Tests of random calls of cross_entropy, against float64 from the same rounded logits."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import allowed_ulps, error_of_probability, exact, ulp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DTYPES_16_BIT = (torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32, torch.uint8)
LAYOUTS = st.sampled_from(["contiguous", "transposed", "behind another", "strided"])


def laid_out(tensor, layout):
    """Return the same values with another memory layout."""
    if tensor.numel() == 0:  # see test_an_empty_batch_may_have_any_strides
        return tensor
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "behind another":
        return torch.stack([tensor, tensor], 0)[1]
    if layout == "strided":
        return torch.stack([tensor, tensor], -1)[..., 1]
    return tensor


@st.composite
def indices(draw, shape, classes, generator):
    """Draw class targets, some of them ignored, and the ignore_index."""
    target = torch.randint(classes, shape, generator=generator)
    ignore_index = draw(st.sampled_from([-100, 0, classes - 1, classes, 255]))
    dtype = draw(st.sampled_from(INDICES if ignore_index >= 0 else INDICES[:2]))
    target[torch.rand(shape, generator=generator) < 0.2] = ignore_index
    return target.to(dtype), ignore_index


@st.composite
def calls(draw, in_place=False):
    """Draw logits, targets and options, on the CPU."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch, classes = draw(st.integers(0, 9)), draw(st.integers(1, 70))
    extra = draw(st.lists(st.integers(0, 3), max_size=2))
    others = [] if in_place else [(batch, classes, *extra), (classes,)]
    shape = draw(st.sampled_from([(batch, classes), *others]))
    of_rows = shape[:1] + shape[2:] if len(shape) > 1 else ()

    dtype = draw(st.sampled_from([*DTYPES_16_BIT, torch.float32, torch.float64]))
    logits = torch.randn(shape, generator=generator) * draw(st.sampled_from([0.1, 4.0, 30.0]))
    logits = laid_out(logits.to(dtype), "behind another" if in_place else draw(LAYOUTS))
    options = {
        "reduction": draw(st.sampled_from(["mean", "sum", *([] if in_place else ["none"])])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.0, 0.1, 1.0])),
    }
    if draw(st.booleans()):
        options["weight"] = torch.rand(classes, generator=generator)
    if draw(st.booleans()):
        target, options["ignore_index"] = draw(indices(of_rows, classes, generator))
    else:
        target = torch.rand(shape, generator=generator).softmax(min(1, len(shape) - 1))
        target = target.to(draw(st.sampled_from([dtype, torch.float32, *DTYPES_16_BIT])))
    return logits, laid_out(target, draw(LAYOUTS)), options


def divisor_of(logits, target, options):
    """Return the number that divides the sum of the rows' losses."""
    if options["reduction"] != "mean":
        return 1.0
    if target.is_floating_point():
        return logits.numel() / logits.shape[min(1, logits.dim() - 1)]
    kept = target[target != options["ignore_index"]].long()
    return float(options["weight"][kept].sum() if "weight" in options else kept.numel())


def tolerance(logits, target, options):
    """Return the allowed error of a row's gradient: in ulps, and as an absolute error.

    The absolute error is for terms that cancel: float32 terms of smoothed targets and
    probabilities, and all terms of the reference. It holds for the loss of a row, too.
    """
    weight = options["weight"].max().item() if "weight" in options else 1.0
    largest = torch.tensor(weight).double() / divisor_of(logits, target, options)
    if logits.dtype == torch.float64:
        return 8, 1e-14 * largest
    if target.is_floating_point() or options["label_smoothing"]:
        return 2, error_of_probability(logits) * largest
    return allowed_ulps(logits), 1e-15 * largest


def assert_near(result, expected, allowed):
    """Check that the error is allowed, and that both have NaNs at the same indices."""
    assert result.shape == expected.shape
    assert torch.equal(result.isnan(), expected.isnan())
    off = (result.detach().double() - expected).abs()
    assert ((off <= allowed) | expected.isnan()).all()


def on(device, call, scale):
    """Return the logits, targets and options of a call, on the device."""
    logits, target, options = call
    options["grad_scale"] = None if scale is None else torch.tensor(scale)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return logits.to(device).requires_grad_(), target.to(device), options


SCALES = st.sampled_from([None, 1024.0, 3.0])
SETTINGS = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None, derandomize=True
)


@pytest.mark.vectorised
@settings(SETTINGS, max_examples=500)
@given(calls(), SCALES)
def test_random_calls_give_the_exact_loss_and_gradient(device, call, scale):
    logits, target, options = on(device, call, scale)

    loss = ampfuse.cross_entropy(logits, target, **options)
    most = scale or 1.0
    upstream = torch.linspace(most / 4, most, loss.numel(), device=device, dtype=loss.dtype)
    upstream = upstream.view_as(loss) if loss.dim() else torch.full_like(loss, most)
    loss.backward(upstream)

    del options["grad_scale"]
    expected, gradient = exact(logits, target, upstream, **options)
    ulps, rounding = tolerance(logits, target, options)
    rows = 1 if loss.dim() else logits.numel()
    relative = 1e-13 if loss.dtype == torch.float64 else 1e-6
    assert loss.dtype == torch.promote_types(logits.dtype, torch.float32)
    assert_near(loss, expected, relative * expected.abs() + rounding * rows)
    of_gradient = (ulps * ulp(logits.dtype, gradient)).where(gradient != 0, 0)
    assert_near(logits.grad, gradient, of_gradient + rounding * most)


@settings(SETTINGS, max_examples=200)
@given(calls(in_place=True), SCALES)
def test_random_in_place_calls_give_the_same_results(device, call, scale):
    leaf, target, options = on(device, call, scale or 1.0)
    upstream = torch.tensor(scale or 1.0, device=device)

    results = []
    for function in (ampfuse.cross_entropy, ampfuse.cross_entropy_):
        loss = function(leaf * 1, target, **options)
        results.append((loss, *torch.autograd.grad(loss, leaf, upstream.to(loss.dtype))))

    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
