"""Tests of where cross_entropy computes its gradient, of backward, and of torch.compile."""

import ampfuse
import pytest
import torch
from cross_entropy_reference import ULPS, exact, ulps_off
from torch.nn import functional


def batch(device, dtype=torch.bfloat16, rows=8, classes=300):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).to(device, dtype).requires_grad_()
    return logits, torch.randint(classes, (rows,), generator=generator).to(device)


def ops_of(call):
    """Return the names of ampfuse's operators that `call` runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [event.name for event in profile.events() if event.name.startswith("ampfuse::")]


IN_FORWARD = ["ampfuse::cross_entropy", "ampfuse::cross_entropy_forward"]


def test_gradient_of_a_mean_is_computed_in_forward(device):
    logits, target = batch(device)
    names = ops_of(lambda: ampfuse.cross_entropy(logits, target).backward())
    assert names == [*IN_FORWARD, "ampfuse::cross_entropy_rescale_"]


@pytest.mark.parametrize("case", ["none", "half without a scale", "probabilities that need one"])
def test_gradient_is_computed_in_backward_if_not_possible_in_forward(device, case):
    logits, target = batch(device, torch.float16 if "half" in case else torch.float32)
    if "probabilities" in case:
        target = torch.rand(logits.shape, device=device, requires_grad=True)
    reduction = "none" if case == "none" else "mean"
    names = ops_of(
        lambda: ampfuse.cross_entropy(logits, target, reduction=reduction).sum().backward()
    )
    assert names == [*IN_FORWARD, "ampfuse::cross_entropy_backward"]


def test_loss_has_no_grad_fn_if_no_gradient_is_needed(device):
    logits, target = batch(device)
    with torch.no_grad():
        assert ampfuse.cross_entropy(logits, target).grad_fn is None
    assert ampfuse.cross_entropy(logits.detach(), target).grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("upstream", [3.7, 1e-3, 1.0, 0.0, -2.0])
def test_gradient_is_rescaled_if_the_upstream_gradient_is_not_grad_scale(
    device, dtype, reduction, upstream
):
    logits, target = batch(device, dtype)
    scale = torch.tensor(16.0, device=device)
    loss = ampfuse.cross_entropy(logits, target, reduction=reduction, grad_scale=scale)
    loss.backward(torch.tensor(upstream, device=device))
    _, gradient = exact(logits, target, upstream, reduction=reduction)
    # The gradient is rounded for grad_scale and again for the upstream gradient, by half an ulp at
    # most. The first error may double, if the second result is just below a power of two.
    assert ulps_off(logits.grad, gradient) <= (1.5 if ULPS == 1 else 2.5)


@pytest.mark.parametrize("scale", [0.0, float("inf"), float("nan")])
def test_grad_scale_of_zero_infinity_or_nan_is_replaced_by_one(device, scale):
    logits, target = batch(device)
    expected = torch.tensor(scale, device=device)
    (grad,) = torch.autograd.grad(
        ampfuse.cross_entropy(logits, target, grad_scale=expected), logits
    )
    (reference,) = torch.autograd.grad(ampfuse.cross_entropy(logits, target), logits)
    assert torch.equal(grad, reference)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_backward_may_run_again_only_if_the_graph_is_kept(device, reduction):
    logits, target = batch(device)
    loss = ampfuse.cross_entropy(logits, target, reduction=reduction).sum()
    (first,) = torch.autograd.grad(
        loss, logits, torch.tensor(3.0, device=device), retain_graph=True
    )
    first_again = first.clone()
    (second,) = torch.autograd.grad(loss, logits, retain_graph=True)
    second.mul_(0)  # the caller owns the gradient that it got
    (third,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, first_again)
    assert ulps_off(third, exact(logits, target, reduction=reduction)[1]) <= ULPS
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_second_derivative_is_refused(device, reduction):
    logits, target = batch(device, torch.float32)
    loss = ampfuse.cross_entropy(logits, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.square().sum().backward()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1, "softcap": 3.0}])
@pytest.mark.parametrize("probabilities", [False, True])
def test_gradients_equal_finite_differences(device, reduction, options, probabilities):
    logits, target = batch(device, torch.float64, rows=3, classes=5)
    weight = torch.rand(5, dtype=torch.float64, device=device)
    if probabilities:
        target = torch.rand(3, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, t: ampfuse.cross_entropy(x, t, weight, reduction=reduction, **options),
        (logits, target),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gradient_of_probability_targets_is_correct(device, dtype, softcap):
    logits, _ = batch(device, dtype)
    target = torch.rand(logits.shape, device=device).softmax(1).requires_grad_()

    loss = ampfuse.cross_entropy(logits, target, label_smoothing=0.1, softcap=softcap)
    (grad,) = torch.autograd.grad(loss, target)

    z = logits.detach().double()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    expected = -0.9 * z.log_softmax(1) / len(z)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-5, atol=1e-7)


def test_float16_gradients_of_many_rows_do_not_underflow_with_grad_scale(device):
    """Without grad_scale most would be 0: p / 8192 is below float16's smallest number."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8192, 1000, generator=generator) * 3
    logits = logits.to(device, torch.float16).requires_grad_()
    target = torch.randint(1000, (8192,), generator=generator).to(device)
    scale = torch.tensor(65536.0, device=device)

    (grad,) = torch.autograd.grad(
        ampfuse.cross_entropy(logits, target, grad_scale=scale), logits, scale
    )

    _, gradient = exact(logits, target, 65536.0)
    assert ulps_off(grad, gradient) <= ULPS
    unscaled = (gradient / 65536).half()
    assert (unscaled == 0).float().mean() > 0.8
    assert (grad == 0).float().mean() < 0.01


def test_micro_batches_with_one_denominator_add_up_to_the_batch(device):
    logits, target = batch(device, torch.float32, rows=12)
    target[::5] = -100
    count = (target != -100).sum()
    whole = ampfuse.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(whole, logits)
    parts = [
        ampfuse.cross_entropy(x, t, denominator=count)
        for x, t in zip(logits.split(5), target.split(5), strict=True)
    ]
    (of_parts,) = torch.autograd.grad(sum(parts), logits)
    assert torch.allclose(sum(parts), whole)
    assert torch.equal(of_parts, grad)


def test_results_of_a_row_do_not_depend_on_other_rows(device):
    logits, target = batch(device, torch.float32, rows=9, classes=5000)
    whole = ampfuse.cross_entropy(logits, target, reduction="none")
    (grad,) = torch.autograd.grad(whole.sum(), logits)
    for row in (0, 4, 8):
        alone = logits[row : row + 1].detach().requires_grad_()
        loss = ampfuse.cross_entropy(alone, target[row : row + 1], reduction="none")
        loss.backward(torch.ones(1, device=device))
        assert torch.equal(loss, whole[row : row + 1])
        assert torch.equal(alone.grad, grad[row : row + 1])


def test_results_do_not_depend_on_the_number_of_threads(set_threads):
    logits, target = batch(torch.device("cpu"), torch.float32, rows=3, classes=9000)
    results = []
    for threads in (1, 2, 4):  # 1 and 2 are fewer than rows; 4 are more, and share each row
        set_threads(threads)
        for _ in range(2):
            loss = ampfuse.cross_entropy(logits, target)
            results.append((loss, *torch.autograd.grad(loss, logits)))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert torch.equal(grad, results[0][1])


def test_logits_are_not_overwritten(device):
    logits, target = batch(device)
    before = logits.detach().clone()
    ampfuse.cross_entropy(logits, target).backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("upstream", [8.0, 3.0])
def test_in_place_logits_are_overwritten_with_their_gradient(device, dtype, upstream):
    leaf, target = batch(device, dtype)
    scale = torch.tensor(8.0, device=device)
    expected = ampfuse.cross_entropy(leaf, target, grad_scale=scale)
    (reference,) = torch.autograd.grad(expected, leaf, torch.tensor(upstream, device=device))

    logits = leaf * 1
    address = logits.data_ptr()
    loss = ampfuse.cross_entropy_(logits, target, grad_scale=scale)
    (grad,) = torch.autograd.grad(loss, leaf, torch.tensor(upstream, device=device))

    assert torch.equal(loss, expected)
    assert torch.equal(grad, reference)
    assert logits.data_ptr() == address
    assert torch.equal(logits, reference)


def test_in_place_call_is_refused_if_logits_cannot_be_overwritten(device):
    leaf, target = batch(device)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        ampfuse.cross_entropy_(leaf, target)
    with pytest.raises(ValueError, match="expected mean or sum, got none"):
        ampfuse.cross_entropy_(leaf * 1, target, reduction="none")
    with pytest.raises(ValueError, match="class dimension has stride 1"):
        ampfuse.cross_entropy_((leaf * 1).t(), target)
    with pytest.raises(Exception, match="cannot be overwritten inside"):
        torch.compile(
            lambda x: ampfuse.cross_entropy_(x * 1, target), fullgraph=True, backend="aot_eager"
        )(leaf)


def test_backward_of_an_op_that_needs_overwritten_logits_raises(device):
    leaf, target = batch(device, torch.float32)
    logits = leaf.exp()  # its backward reads its result
    loss = ampfuse.cross_entropy_(logits, target)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_loss_is_correct_for_any_batch_size_without_recompiling(
    device, reduction, backend
):
    weight = torch.rand(300, device=device)

    def loss_of(logits, target, scale):
        return ampfuse.cross_entropy(
            logits * 2,
            target,
            weight,
            reduction=reduction,
            grad_scale=None if reduction == "none" else scale,
            label_smoothing=0.1,
        ).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows, scale in ((8, 4.0), (13, 4.0), (21, 2.0)):
            logits, target = batch(device, torch.float32, rows=rows)
            scale = torch.tensor(scale, device=device)
            loss = compiled(logits, target, scale)
            (grad,) = torch.autograd.grad(loss, logits, scale)
            expected = loss_of(logits, target, scale)
            (reference,) = torch.autograd.grad(expected, logits, scale)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(grad, reference)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_nothing_and_the_loss_is_more_exact_than_torchs(device, dtype):
    """torch rounds log-probabilities to 16 bits: here, and also under CUDA's autocast."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(64, 5000, generator=generator) * 3).to(device, dtype).requires_grad_()
    target = torch.randint(5000, (64,), generator=generator).to(device)
    with torch.autocast(device.type, dtype):
        names = ops_of(lambda: ampfuse.cross_entropy(logits, target))
        loss = ampfuse.cross_entropy(logits, target)
    assert names == IN_FORWARD
    assert loss.dtype == torch.float32
    expected, _ = exact(logits, target)
    rounded = functional.cross_entropy(logits, target)
    assert (loss.double() - expected).abs() * 100 < (rounded.double() - expected).abs()


def test_loss_module_with_a_scaler_computes_its_gradient_in_forward(device):
    logits, target = batch(device, torch.float16)
    scaler = ampfuse.GradScaler(device.type, 1024.0)
    criterion = ampfuse.CrossEntropyLoss(label_smoothing=0.1, scaler=scaler)
    names = ops_of(lambda: scaler.scale(criterion(logits, target)).backward())
    assert "ampfuse::cross_entropy_rescale_" in names
    assert isinstance(criterion, torch.nn.CrossEntropyLoss)
    _, gradient = exact(logits, target, 1024.0, label_smoothing=0.1)
    assert ulps_off(logits.grad, gradient) <= 1.1 * ULPS


def test_metrics_equal_those_computed_from_the_logits(device):
    logits, target = batch(device, torch.float32)
    target[2] = -100
    target[3] = logits[3].argmax()
    loss, metrics = ampfuse.cross_entropy(logits, target, return_metrics=True)
    log_p = logits.detach().double().log_softmax(1)
    torch.testing.assert_close(loss, functional.cross_entropy(logits, target))
    torch.testing.assert_close(metrics.lse, logits.detach().logsumexp(1))
    torch.testing.assert_close(metrics.entropy.double(), -(log_p.exp() * log_p).sum(1))
    assert torch.equal(metrics.argmax, logits.argmax(1))
    assert torch.equal(metrics.correct, (logits.argmax(1) == target) & (target != -100))
    assert metrics.correct[3]
    assert not metrics.lse.requires_grad
    loss.backward()
    assert ulps_off(logits.grad, exact(logits, target)[1]) <= ULPS
