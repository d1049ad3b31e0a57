"""Tests of cross_entropy with torch.func, compiled autograd, and modes that see operators."""

import ampfuse
import pytest
import torch
from cross_entropy_samples import batch
from loss_transforms import TRANSFORMS
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

EVERY_KIND = pytest.mark.parametrize("reduction", ["mean", "none"])


def torchs_gradient(logits, target, upstream=1.0):
    x = logits.detach().requires_grad_()
    (functional.cross_entropy(x, target) * upstream).backward()
    return x.grad


def three_batches(device):
    logits, target = batch(device, (18, 50), leaf=False)
    return logits.view(3, 6, 50), target.view(3, 6)


@EVERY_KIND
def test_vmap_equals_a_loop(device, reduction):
    logits, target = three_batches(device)
    logits.requires_grad_()

    def losses_of(x, t):
        return ampfuse.cross_entropy(x, t, reduction=reduction)

    losses = torch.func.vmap(losses_of)(logits, target)
    each = torch.stack([losses_of(x, t) for x, t in zip(logits, target, strict=True)])
    assert torch.equal(losses, each)
    grads = [torch.autograd.grad(x.sum(), logits)[0] for x in (losses, each)]
    assert torch.equal(*grads)


def test_vmap_inside_torch_compile_is_one_graph(device):
    logits, target = three_batches(device)

    def losses_of(logits):
        return torch.func.vmap(ampfuse.cross_entropy)(logits, target)

    torch._dynamo.reset()
    losses = torch.compile(losses_of, backend="aot_eager", fullgraph=True)(logits)
    assert torch.equal(losses, losses_of(logits))


def test_in_place_vmap_is_refused(device):
    with pytest.raises(RuntimeError, match="Batching rule not implemented for ampfuse::cross_ent"):
        torch.func.vmap(ampfuse.cross_entropy_)(*three_batches(device))


LOSSES = {
    "mean": ampfuse.cross_entropy,
    "none": lambda x, target: ampfuse.cross_entropy(x, target, reduction="none").sum(),
    "metrics": lambda x, target: ampfuse.cross_entropy(x, target, return_metrics=True)[0],
    "weighted": lambda x, target: ampfuse.cross_entropy(x, target, torch.ones(50, device=x.device)),
    "in place": lambda x, target: ampfuse.cross_entropy_(x * 1, target),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_error_for_unsupported_transforms_names_the_function(device, transform):
    logits, target = batch(device, leaf=False)
    for kind, loss in LOSSES.items():
        if kind == "in place" and transform == "grad of vmap":
            continue  # vmap refuses it
        name = "cross_entropy_" if kind == "in place" else "cross_entropy"
        message = rf"^{name}: torch\.func .* use torch\.nn"
        with pytest.raises(NotImplementedError, match=message):
            TRANSFORMS[transform](lambda x, loss=loss: loss(x, target), logits)
    TRANSFORMS[transform](lambda x: functional.cross_entropy(x, target), logits)  # the advice works


def test_forward_mode_is_refused_in_place_before_the_logits_are_overwritten(device):
    logits, target = batch(device, leaf=False)
    before = logits.clone()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^cross_entropy_: "):
        ampfuse.cross_entropy_(forward_ad.make_dual(logits, torch.ones_like(logits)), target)
    assert torch.equal(logits, before)


def test_losses_that_are_not_differentiated_work_inside_transforms(device):
    logits, target = batch(device, leaf=False)
    expected = ampfuse.cross_entropy(logits, target)

    def loss_and_metric(x):
        with torch.no_grad():
            metric = ampfuse.cross_entropy(x, target)
        detached = ampfuse.cross_entropy(x.detach(), target)
        return functional.cross_entropy(x, target), (metric, detached)

    _, metrics = torch.func.grad(loss_and_metric, has_aux=True)(logits)
    assert all(torch.equal(metric, expected) for metric in metrics)
    with forward_ad.dual_level():
        assert torch.equal(ampfuse.cross_entropy(logits, target), expected)


@pytest.mark.parametrize("vectorize", [False, True])
@EVERY_KIND
def test_jacobians_equal_torchs(device, reduction, vectorize):
    logits, target = batch(device, leaf=False)

    def jacobian(function):
        return torch.autograd.functional.jacobian(
            lambda x: function(x, target, reduction=reduction), logits, vectorize=vectorize
        )

    torch.testing.assert_close(jacobian(ampfuse.cross_entropy), jacobian(functional.cross_entropy))


# Autograd is called for the logits only, and skips nodes from which they cannot be reached.
DERIVATIVES = {
    "grad": lambda total, logits: torch.autograd.grad(total, logits, retain_graph=True),
    "backward": lambda total, logits: total.backward(inputs=[logits], retain_graph=True),
}


@EVERY_KIND
@pytest.mark.parametrize("differentiate", DERIVATIVES.values(), ids=list(DERIVATIVES))
def test_second_derivative_is_refused_and_not_left_out(device, reduction, differentiate):
    logits, target = batch(device)
    loss = ampfuse.cross_entropy(logits, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    penalty = grad.square().sum()
    for total in (penalty, loss + penalty):
        with pytest.raises(RuntimeError, match="no second derivative"):
            differentiate(total, logits)


@pytest.mark.parametrize("kind", ["mean", "none", "in place"])
def test_compiled_backward_of_an_eager_forward_gives_torchs_gradient(device, kind):
    logits, target = batch(device)
    if kind == "in place":
        loss = ampfuse.cross_entropy_(logits * 1, target)
    else:
        loss = ampfuse.cross_entropy(logits, target, reduction=kind)

    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        loss.mean().backward()

    torch.testing.assert_close(logits.grad, torchs_gradient(logits, target))


@EVERY_KIND
def test_backward_inside_torch_compile_gives_torchs_gradient(device, reduction):
    logits, target = batch(device)

    def step(logits):
        (ampfuse.cross_entropy(logits * 2, target, reduction=reduction).mean() * 3).backward()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(logits)

    expected = 2 * torchs_gradient(2 * logits, target, 3.0)
    torch.testing.assert_close(logits.grad, expected)


MODES = {
    "one that sees operators": lambda: FlopCounterMode(display=False),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
}


@EVERY_KIND
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_gradient_under_a_mode_equals_torchs(device, reduction, mode):
    logits, target = batch(device)
    with mode():
        ampfuse.cross_entropy(logits, target, reduction=reduction).mean().backward()
    torch.testing.assert_close(logits.grad, torchs_gradient(logits, target))


def test_checkpoint_whose_forward_ran_under_a_mode_gives_torchs_gradient(device):
    logits, target = batch(device)
    with FlopCounterMode(display=False):
        loss = checkpoint(ampfuse.cross_entropy, logits, target, use_reentrant=False)
    loss.backward()
    torch.testing.assert_close(logits.grad, torchs_gradient(logits, target))
