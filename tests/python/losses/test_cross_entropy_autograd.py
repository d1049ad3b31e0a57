"""Tests of where cross_entropy computes its gradient, of backward, and of torch.compile."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, assert_exact, exact, results, scaled, ulps_off
from cross_entropy_samples import batch
from torch.nn import functional

ROWS, POSITIONS = (8, 300), (2, 5, 33)


def ops_of(call):
    """Return the names of ampfuse's operators that `call` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = [event.name for event in profile.events() if event.name.startswith("ampfuse::")]
    return [name.removeprefix("ampfuse::") for name in names]


IN_FORWARD = ["cross_entropy", "cross_entropy_forward"]


@pytest.mark.parametrize(
    "case", ["mean", "none", "half without a scale", "probabilities that need one"]
)
def test_gradient_is_computed_in_forward_if_possible(device, case):
    logits, target = batch(device, ROWS, torch.float16 if "half" in case else torch.float32)
    if "probabilities" in case:
        target = torch.rand(logits.shape, device=device, requires_grad=True)
    reduction = "none" if case == "none" else "mean"
    names = ops_of(
        lambda: ampfuse.cross_entropy(logits, target, reduction=reduction).sum().backward()
    )
    last = "cross_entropy_rescale_" if case == "mean" else "cross_entropy_backward"
    assert names == [*IN_FORWARD, last]


def test_loss_has_no_grad_fn_if_no_gradient_is_needed(device):
    logits, target = batch(device, ROWS)
    with torch.no_grad():
        assert ampfuse.cross_entropy(logits, target).grad_fn is None
    assert ampfuse.cross_entropy(logits.detach(), target).grad_fn is None


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [ROWS, (3, 5, 33), (1, 2, 90, 91)], ids=str)
def test_gradient_is_rescaled_if_the_upstream_gradient_is_not_grad_scale(device, dtype, shape):
    logits, target = batch(device, shape, dtype)
    options = {"grad_scale": torch.tensor(16.0, device=device)}
    for reduction in ("mean", "sum"):
        options["reduction"] = reduction
        for upstream in (3.7, 1e-3, 1.0, 0.0, -2.0):
            _, grad = results(ampfuse.cross_entropy, logits, target, upstream, **options)
            _, gradient = exact(logits, target, upstream, reduction=reduction)
            # The gradient is rounded for grad_scale and again for the upstream gradient, by half an
            # ulp at most. The first error may double, if the second result is just below a power of
            # two.
            assert ulps_off(grad, gradient) <= (1.5 if ULPS == 1 else 2.5), (reduction, upstream)


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_grad_scale_of_zero_infinity_or_nan_is_replaced_by_one(device, scale):
    logits, target = batch(device, ROWS, torch.bfloat16)
    scale = torch.tensor(scale, device=device)
    found = results(ampfuse.cross_entropy, logits, target, grad_scale=scale)
    assert all(map(torch.equal, found, results(ampfuse.cross_entropy, logits, target)))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [ROWS, POSITIONS], ids=str)
def test_backward_may_run_again_only_if_the_graph_is_kept(device, reduction, dtype, shape):
    logits, target = batch(device, shape, dtype)
    loss = ampfuse.cross_entropy(logits, target, reduction=reduction).sum()

    def backward(upstream, **options):
        upstream = torch.tensor(upstream, device=device)
        return torch.autograd.grad(loss, logits, upstream, **options)[0]

    tripled = backward(3.0, retain_graph=True)
    tripled_again = tripled.clone()
    once = backward(1.0, retain_graph=True)
    doubled = backward(2.0, retain_graph=True)
    assert torch.equal(doubled, 2 * once)
    once.mul_(0)  # the caller owns the gradient that it got
    last = backward(1.0)
    assert torch.equal(tripled, tripled_again)
    assert ulps_off(last, exact(logits, target, reduction=reduction)[1]) <= ULPS
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# The positions are 16, which are read in place.
@pytest.mark.parametrize("shape", [(3, 5), (1, 3, 16)], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1, "softcap": 3.0}])
@pytest.mark.parametrize("probabilities", [False, True])
def test_gradients_equal_finite_differences(device, shape, options, probabilities):
    logits, target = batch(device, shape, torch.float64)
    weight = torch.rand(shape[1], dtype=torch.float64, device=device)
    if probabilities:
        target = torch.rand(shape, dtype=torch.float64, device=device, requires_grad=True)
    for reduction in ("none", "mean", "sum"):
        assert torch.autograd.gradcheck(
            lambda x, t, how=reduction: ampfuse.cross_entropy(
                x, t, weight, reduction=how, **options
            ),
            (logits, target),
        ), reduction


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradient_of_probability_targets_is_correct(device, dtype):
    logits, _ = batch(device, ROWS, dtype)
    target = torch.rand(logits.shape, device=device).softmax(1).requires_grad_()
    for softcap in (None, 3.0):
        loss = ampfuse.cross_entropy(logits, target, label_smoothing=0.1, softcap=softcap)
        (grad,) = torch.autograd.grad(loss, target)
        z = logits.detach().double()
        z = z if softcap is None else softcap * torch.tanh(z / softcap)
        expected = -0.9 * z.log_softmax(1) / len(z)
        torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-7)


def test_float16_gradients_of_many_rows_do_not_underflow_with_grad_scale(device):
    """Without grad_scale most would be 0: p / 8192 is below float16's smallest number."""
    logits, target = batch(device, (8192, 1000), torch.float16, scale=3)
    found, expected = scaled(logits, target, 65536.0), exact(logits, target, 65536.0)
    assert_exact(found, expected)
    assert ((expected[1] / 65536).half() == 0).float().mean() > 0.8
    assert (found[1] == 0).float().mean() < 0.01


# inductor chooses the strides of the logits, which matter for positions.
@pytest.mark.parametrize(
    ("shapes", "backend"),
    [
        ([(8, 300), (13, 300), (21, 300)], "aot_eager"),
        ([(2, 21, 8, 9), (3, 21, 10, 7), (4, 21, 31, 5)], "inductor"),
    ],
    ids=["rows", "positions"],
)
def test_compiled_loss_is_correct_for_any_size_without_recompiling(device, shapes, backend):
    weight = torch.rand(shapes[0][1], device=device)

    def losses_of(logits, target, scale):
        x, options = logits * 2, {"label_smoothing": 0.1}
        mean = ampfuse.cross_entropy(x, target, weight, grad_scale=scale, **options)
        each = ampfuse.cross_entropy(x, target, weight, reduction="none", **options)
        return mean, each

    torch._dynamo.reset()
    compiled = torch.compile(losses_of, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape, scale in zip(shapes, (4.0, 4.0, 2.0), strict=True):
            logits, target = batch(device, shape)
            scale = torch.tensor(scale, device=device)
            found = []
            for function in (compiled, losses_of):
                losses = function(logits, target, scale)
                upstreams = [scale, torch.full_like(losses[1], 1 / 8)]
                found.append((*losses, *torch.autograd.grad(losses, logits, upstreams)))
            torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_nothing_and_the_loss_is_more_exact_than_torchs(device, dtype):
    """torch rounds log-probabilities to 16 bits: here, and also under CUDA's autocast."""
    logits, target = batch(device, (64, 5000), dtype, scale=3)
    with torch.autocast(device.type, dtype):
        names = ops_of(lambda: ampfuse.cross_entropy(logits, target))
        loss = ampfuse.cross_entropy(logits, target)
    assert names == IN_FORWARD
    assert loss.dtype == torch.float32
    expected, _ = exact(logits, target)
    rounded = functional.cross_entropy(logits, target)
    assert (loss.double() - expected).abs() * 100 < (rounded.double() - expected).abs()
