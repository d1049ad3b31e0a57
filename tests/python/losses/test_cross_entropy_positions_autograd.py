"""Tests of derivatives and operators of cross_entropy for images, whose classes are far apart."""

import ampfuse
import pytest
import torch
from cross_entropy_samples import GRADIENT, NOTHING, STATISTICS, SUM
from test_cross_entropy_positions import EVERY_DTYPE, batch, weights


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("probabilities", [False, True])
def test_gradients_equal_finite_differences(device, reduction, probabilities):
    logits, target = batch(device, (2, 3, 16), torch.float64)
    weight = weights(device, 3).double()
    if probabilities:
        target = torch.rand(logits.shape, device=device, dtype=torch.float64)
        target = target.softmax(1).requires_grad_()

    def loss_of(logits, target):
        return ampfuse.cross_entropy(
            logits, target, weight, reduction=reduction, label_smoothing=0.1, z_loss=1e-2
        )

    assert torch.autograd.gradcheck(loss_of, (logits, target))


def test_backward_may_run_again_if_the_graph_is_kept(device):
    logits, target = batch(device, (2, 5, 33))
    loss = ampfuse.cross_entropy(logits, target)
    grads = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2)]
    (tripled,) = torch.autograd.grad(3 * loss, logits)
    assert torch.equal(*grads)
    torch.testing.assert_close(tripled, 3 * grads[0])


@pytest.mark.parametrize("shape", [(1, 2, 90, 91), (3, 5, 33)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradient_is_doubled_by_an_upstream_gradient_of_two(device, shape, dtype):
    logits, target = batch(device, shape, dtype)
    loss = ampfuse.cross_entropy(logits, target)
    (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (doubled,) = torch.autograd.grad(2 * loss, logits)
    assert torch.equal(doubled, 2 * grad)


def test_hooks_may_return_saved_tensors_with_other_strides(device):
    logits, target = batch(device, (2, 5, 33))
    for reduction in ("none", "mean"):
        loss = ampfuse.cross_entropy(logits, target, reduction=reduction)
        (expected,) = torch.autograd.grad(loss.sum(), logits)

        def apart(x):
            return torch.stack([x, x], -1)[..., 0]

        with torch.autograd.graph.saved_tensors_hooks(apart, lambda x: x):
            loss = ampfuse.cross_entropy(logits, target, reduction=reduction)
        (grad,) = torch.autograd.grad(loss.sum(), logits)
        assert torch.equal(grad, expected)


@EVERY_DTYPE
@pytest.mark.parametrize("batch_size", [2, 0])
def test_operators_pass_opcheck_with_positions(device, dtype, batch_size):
    logits, target = batch(device, (batch_size, 5, 33), dtype)
    rows, target = logits.detach(), target.view(-1)
    ops = torch.ops.ampfuse
    options = (None, SUM, -100, 0.1, None, None, 0.0, None)
    for kept in (NOTHING, STATISTICS, GRADIENT):
        forward = (rows, target, *options, kept, True)
        torch.library.opcheck(ops.cross_entropy_forward.default, forward)
    outputs = ops.cross_entropy_forward(rows, target, *options, STATISTICS, False)
    one = torch.ones((), dtype=outputs[0].dtype, device=device)
    backward = (one, rows, target, None, outputs[3], outputs[4], SUM, -100, 0.1, 0.0, None)
    torch.library.opcheck(ops.cross_entropy_backward.default, backward)
    baked = torch.ones((), device=device)
    torch.library.opcheck(ops.cross_entropy_rescale_.default, (rows, baked, 3 * one))
    torch.library.opcheck(
        ops.cross_entropy.default, (logits, target.view(batch_size, 33), None, SUM)
    )


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_compiled_loss_is_correct_for_any_size_without_recompiling(device, reduction):
    def loss_of(logits, target):
        return ampfuse.cross_entropy(logits * 2, target, reduction=reduction).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss_of, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in ((2, 21, 8, 9), (3, 21, 10, 7), (4, 21, 31, 5)):
            logits, target = batch(device, shape)
            loss = compiled(logits, target)
            (grad,) = torch.autograd.grad(loss, logits)
            expected = loss_of(logits, target)
            (gradient,) = torch.autograd.grad(expected, logits)
            torch.testing.assert_close(loss, expected)
            torch.testing.assert_close(grad, gradient)
