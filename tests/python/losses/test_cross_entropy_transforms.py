"""Tests of cross_entropy with torch.func, compiled autograd, and modes that see operators."""

import ampfuse
import pytest
import torch
from loss_transforms import TRANSFORMS
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

KINDS = ["mean", "none"]
EVERY_KIND = pytest.mark.parametrize("reduction", KINDS)


def batch(device, *shape):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(*shape, generator=generator).to(device)
    target = torch.randint(shape[-1], shape[:-1], generator=generator).to(device)
    return logits, target


def torchs_gradient(logits, target, upstream=1.0):
    x = logits.detach().requires_grad_()
    (functional.cross_entropy(x, target) * upstream).backward()
    return x.grad


@EVERY_KIND
def test_vmap_equals_a_loop(device, reduction):
    logits, target = batch(device, 3, 6, 50)
    logits.requires_grad_()

    losses = torch.func.vmap(lambda x, t: ampfuse.cross_entropy(x, t, reduction=reduction))(
        logits, target
    )
    (grad,) = torch.autograd.grad(losses.sum(), logits)

    each = [
        ampfuse.cross_entropy(x, t, reduction=reduction)
        for x, t in zip(logits, target, strict=True)
    ]
    assert torch.equal(losses, torch.stack(each))
    assert torch.equal(grad, torch.autograd.grad(sum(loss.sum() for loss in each), logits)[0])


def test_vmap_inside_torch_compile_is_one_graph(device):
    logits, target = batch(device, 3, 6, 50)

    def losses_of(logits):
        return torch.func.vmap(ampfuse.cross_entropy)(logits, target)

    torch._dynamo.reset()
    losses = torch.compile(losses_of, backend="aot_eager", fullgraph=True)(logits)
    assert torch.equal(losses, losses_of(logits))


def test_in_place_vmap_is_refused(device):
    logits, target = batch(device, 3, 6, 50)
    with pytest.raises(RuntimeError, match="Batching rule not implemented for ampfuse::cross_ent"):
        torch.func.vmap(ampfuse.cross_entropy_)(logits, target)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", [*KINDS, "metrics", "weighted"])
def test_error_for_unsupported_transforms_names_the_function(device, kind, transform):
    logits, target = batch(device, 6, 50)

    def loss_of(x):
        if kind == "weighted":
            return ampfuse.cross_entropy(x, target, torch.ones(50, device=device))
        if kind == "metrics":
            return ampfuse.cross_entropy(x, target, return_metrics=True)[0]
        return ampfuse.cross_entropy(x, target, reduction=kind).sum()

    with pytest.raises(NotImplementedError, match=r"^cross_entropy: torch\.func .* use torch\.nn"):
        TRANSFORMS[transform](loss_of, logits)
    TRANSFORMS[transform](lambda x: functional.cross_entropy(x, target), logits)  # the advice works


@pytest.mark.parametrize("transform", sorted(TRANSFORMS.keys() - {"grad of vmap"}))
def test_transforms_are_refused_in_place(device, transform):
    logits, target = batch(device, 6, 50)
    with pytest.raises(NotImplementedError, match=r"^cross_entropy_: torch\.func .* use torch\.nn"):
        TRANSFORMS[transform](lambda x: ampfuse.cross_entropy_(x * 1, target), logits)


def test_forward_mode_is_refused_in_place_before_the_logits_are_overwritten(device):
    logits, target = batch(device, 6, 50)
    before = logits.clone()
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"^cross_entropy_: "):
        ampfuse.cross_entropy_(forward_ad.make_dual(logits, torch.ones_like(logits)), target)
    assert torch.equal(logits, before)


def test_losses_that_are_not_differentiated_work_inside_transforms(device):
    logits, target = batch(device, 6, 50)
    expected = ampfuse.cross_entropy(logits, target)

    def loss_and_metric(x):
        with torch.no_grad():
            metric = ampfuse.cross_entropy(x, target)
        return functional.cross_entropy(x, target), (
            metric,
            ampfuse.cross_entropy(x.detach(), target),
        )

    _, metrics = torch.func.grad(loss_and_metric, has_aux=True)(logits)
    assert all(torch.equal(metric, expected) for metric in metrics)
    with forward_ad.dual_level():
        assert torch.equal(ampfuse.cross_entropy(logits, target), expected)


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_jacobians_equal_torchs(device, reduction, vectorize):
    logits, target = batch(device, 6, 50)

    def jacobian(function):
        return torch.autograd.functional.jacobian(
            lambda x: function(x, target, reduction=reduction), logits, vectorize=vectorize
        )

    torch.testing.assert_close(jacobian(ampfuse.cross_entropy), jacobian(functional.cross_entropy))


# Autograd is called for the logits only, and skips nodes from which they cannot be reached.
DERIVATIVES = {
    "grad": lambda total, logits: torch.autograd.grad(total, logits),
    "backward": lambda total, logits: total.backward(inputs=[logits]),
}


@EVERY_KIND
@pytest.mark.parametrize("differentiate", DERIVATIVES.values(), ids=list(DERIVATIVES))
def test_second_derivative_is_refused_and_not_left_out(device, reduction, differentiate):
    logits, target = batch(device, 6, 50)
    logits.requires_grad_()
    loss = ampfuse.cross_entropy(logits, target, reduction=reduction).sum()
    (grad,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        differentiate(loss + grad.square().sum(), logits)


@EVERY_KIND
def test_hessian_is_refused(device, reduction):
    logits, target = batch(device, 6, 50)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.functional.hessian(
            lambda x: ampfuse.cross_entropy(x, target, reduction=reduction).sum(), logits
        )


@pytest.mark.parametrize("kind", [*KINDS, "in place"])
def test_compiled_backward_of_an_eager_forward_gives_torchs_gradient(device, kind):
    logits, target = batch(device, 6, 50)
    logits.requires_grad_()
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
    logits, target = batch(device, 6, 50)
    logits.requires_grad_()

    def step(logits):
        (ampfuse.cross_entropy(logits * 2, target, reduction=reduction).mean() * 3).backward()

    torch._dynamo.reset()
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(logits)

    expected = 2 * torchs_gradient(2 * logits, target, 3.0)
    torch.testing.assert_close(logits.grad, expected)


@EVERY_KIND
def test_gradient_under_a_mode_that_sees_operators_equals_torchs(device, reduction):
    logits, target = batch(device, 6, 50)
    logits.requires_grad_()
    with FlopCounterMode(display=False):
        ampfuse.cross_entropy(logits, target, reduction=reduction).mean().backward()
    torch.testing.assert_close(logits.grad, torchs_gradient(logits, target))


def test_checkpoint_whose_forward_ran_under_a_mode_gives_torchs_gradient(device):
    logits, target = batch(device, 6, 50)
    logits.requires_grad_()
    with FlopCounterMode(display=False):
        loss = checkpoint(ampfuse.cross_entropy, logits, target, use_reentrant=False)
    loss.backward()
    torch.testing.assert_close(logits.grad, torchs_gradient(logits, target))


@EVERY_KIND
def test_anomaly_detection_finds_none_in_backward(device, reduction):
    logits, target = batch(device, 6, 50)
    logits.requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        ampfuse.cross_entropy(logits, target, reduction=reduction).mean().backward()
    torch.testing.assert_close(logits.grad, torchs_gradient(logits, target))
