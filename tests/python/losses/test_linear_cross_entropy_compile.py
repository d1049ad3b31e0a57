"""Tests of linear_cross_entropy inside torch.compile and under autocast."""

import ampfuse
import pytest
import torch
from linear_reference import TOLERANCE, exactly, head, off
from torch._dynamo.testing import CompileCounter

pytestmark = pytest.mark.usefixtures("fresh_compiler")

EVERY_REDUCTION = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def step_of(**options):
    def step(hidden, weight, bias, target):
        return ampfuse.linear_cross_entropy(hidden * 2, weight, target, bias, **options)

    return step


@EVERY_DTYPE
@EVERY_REDUCTION
def test_fully_compiled_loss_and_gradients_are_exact(device, dtype, reduction):
    batch = head(device, dtype)
    step = torch.compile(step_of(reduction=reduction, chunk_rows=8), fullgraph=True)
    right = head(device, dtype)
    right.hidden = (right.hidden.detach() * 2).requires_grad_()
    for upstream in (1.0, 3.0):
        loss = step(batch.hidden, batch.weight, batch.bias, batch.target)
        expected = exactly(right, upstream, reduction=reduction)
        assert off(loss, expected.loss) <= 1e-6
        grads = batch.grads(loss, upstream)
        for grad, exact, factor in zip(grads, expected.grads, (2, 1, 1), strict=True):
            assert off(grad, exact * factor) <= TOLERANCE[dtype] * 2


@EVERY_REDUCTION
def test_new_number_of_rows_compiles_nothing_anew(device, reduction):
    counter = CompileCounter()
    step = torch.compile(
        step_of(reduction=reduction, chunk_rows=8, label_smoothing=0.1),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for rows in (21, 5, 8, 64):
        batch = head(device, torch.float32, rows=rows)
        loss = step(batch.hidden, batch.weight, batch.bias, batch.target)
        batch.grads(loss)
    assert counter.frame_count == 1


@EVERY_REDUCTION
def test_inductor_compiles_once_for_any_number_of_rows(device, reduction):
    step = torch.compile(step_of(reduction=reduction), fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (21, 5, 64):
            batch = head(device, torch.bfloat16, rows=rows)
            right = head(device, torch.bfloat16, rows=rows)
            right.hidden = (right.hidden.detach() * 2).requires_grad_()
            loss = step(batch.hidden, batch.weight, batch.bias, batch.target)
            expected = exactly(right, reduction=reduction)
            for grad, exact, factor in zip(
                batch.grads(loss), expected.grads, (2, 1, 1), strict=True
            ):
                assert off(grad, exact * factor) <= TOLERANCE[torch.bfloat16] * 2


def test_compiled_backward_adds_the_weight_gradient_to_the_buffer(device):
    batch = head(device, torch.float32)
    buffer = torch.ones(101, 24, device=device)

    @torch.compile(fullgraph=True)
    def step(hidden, weight, bias, target, buffer):
        return ampfuse.linear_cross_entropy(hidden, weight, target, bias, accumulate_into=buffer)

    loss = step(batch.hidden, batch.weight, batch.bias, batch.target, buffer)
    assert (buffer == 1).all()
    (2 * loss).backward()
    right = exactly(batch, 2.0)
    assert batch.weight.grad is None
    assert off(buffer - 1, right.grads[1]) <= TOLERANCE[torch.float32] * 2
    assert off(batch.hidden.grad, right.grads[0]) <= TOLERANCE[torch.float32] * 2


def test_metrics_in_a_compiled_step_equal_eager_ones(device):
    batch = head(device, torch.float32)
    step = torch.compile(step_of(return_metrics=True), fullgraph=True)
    loss, metrics = step(batch.hidden, batch.weight, batch.bias, batch.target)
    expected, right = step_of(return_metrics=True)(
        batch.hidden, batch.weight, batch.bias, batch.target
    )
    torch.testing.assert_close(loss, expected)
    for metric, exact in zip(metrics, right, strict=True):
        torch.testing.assert_close(metric, exact)


@pytest.mark.parametrize("is_compiled", [False, True])
@EVERY_REDUCTION
@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_autocast_sets_the_dtype_of_products_but_not_of_gradients(
    device, is_compiled, reduction, cast
):
    """Gradients of float32 tensors are not rounded to the dtype of autocast."""
    batch = head(device, torch.float32)

    def step(hidden, weight, bias, target):
        with torch.autocast(device.type, cast):
            return ampfuse.linear_cross_entropy(
                hidden, weight, target, bias, reduction=reduction, chunk_rows=8
            )

    if is_compiled:
        step = torch.compile(step, fullgraph=True)
    loss = step(batch.hidden, batch.weight, batch.bias, batch.target)
    rounded = head(device, torch.float32)
    with torch.no_grad():
        rounded.hidden.copy_(rounded.hidden.to(cast))
        rounded.weight.copy_(rounded.weight.to(cast))
    right = exactly(rounded, reduction=reduction)
    assert loss.dtype == torch.float32
    assert off(loss, right.loss) <= 1e-6
    for tensor, grad, exact in zip(batch.tensors(), batch.grads(loss), right.grads, strict=True):
        assert grad.dtype == torch.float32
        assert off(grad, exact) <= TOLERANCE[cast]
        if tensor is not batch.bias and reduction != "none":
            assert (grad != grad.to(cast).float()).any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_outside_autocast_gives_the_same_bits_as_inside(device, reduction):
    batch = head(device, torch.float32)
    with torch.autocast(device.type, torch.bfloat16):
        inside = batch.loss(reduction=reduction)
        expected = batch.grads(inside, retain_graph=True)
    for grad, right in zip(batch.grads(inside), expected, strict=True):
        assert torch.equal(grad, right)


def test_16_bit_hidden_states_may_meet_a_float32_weight_under_autocast(device):
    batch = head(device, torch.float32)
    hidden = batch.hidden.detach().bfloat16().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        loss = ampfuse.linear_cross_entropy(hidden, batch.weight, batch.target, batch.bias)
    grad_hidden, grad_weight = torch.autograd.grad(loss, (hidden, batch.weight))
    assert (grad_hidden.dtype, grad_weight.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_does_not_change_float64_losses(device):
    batch = head(device, torch.float64)
    expected = batch.loss()
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(batch.loss(), expected)
