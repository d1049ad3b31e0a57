"""Tests of linear_cross_entropy's backward: upstream gradients, repeated calls, frozen tensors."""

import pytest
import torch
from linear_reference import TOLERANCE, check, exactly, head, off
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
EVERY_REDUCTION = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@EVERY_DTYPE
@EVERY_REDUCTION
@pytest.mark.parametrize("upstream", [0.0, 1.0, -3.0, 0.1, 1024.0])
def test_any_upstream_gradient_gives_the_exact_gradients(device, dtype, reduction, upstream):
    if dtype == torch.float16 and reduction != "mean":
        upstream /= 64  # so that float16 can hold the gradients
    check(head(device, dtype), upstream=upstream, reduction=reduction, chunk_rows=8)


@EVERY_DTYPE
def test_rows_may_have_different_upstream_gradients(device, dtype):
    upstream = torch.randn(21, generator=torch.Generator().manual_seed(9)).to(device)
    check(head(device, dtype), upstream=upstream, reduction="none", chunk_rows=8)


@EVERY_DTYPE
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("expected", [1.0, 3.0, 2.0**10])
@pytest.mark.parametrize("upstream", [1.0, 3.0, 2.0**10])
def test_upstream_gradient_may_equal_grad_scale_or_differ_from_it(
    device, dtype, reduction, expected, upstream
):
    # The upstream gradient of a row is then 4 at most, so float16 can hold the gradients.
    if dtype == torch.float16 and reduction == "sum":
        expected, upstream = expected / 2**8, upstream / 2**8
    check(
        head(device, dtype),
        upstream=upstream,
        reduction=reduction,
        chunk_rows=8,
        grad_scale=torch.tensor(expected, device=device),
        tolerance=2,
    )


@pytest.mark.parametrize("wish", [0.0, float("inf"), float("nan")])
def test_grad_scale_of_zero_infinity_or_nan_does_not_change_gradients(device, wish):
    check(head(device, torch.float32), grad_scale=wish, upstream=3.0)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("how", ["nothing", "grad_scale"])
def test_float16_gradients_do_not_underflow_for_thousands_of_rows(device, reduction, how):
    """Divided by the rows, a probability is 1.2e-7: two of float16's smallest steps."""
    rows, features, classes, scale = 8192, 16, 1000, 65536.0
    batch = head(device, torch.float16, rows, features, classes, bias=False)
    batch.weight.detach().mul_(0.01)
    options = {"grad_scale": scale} if how == "grad_scale" else {}
    loss = batch.loss(reduction=reduction, chunk_rows=1000, **options)
    upstream = scale / rows if reduction != "mean" else scale
    grads = batch.grads(loss, upstream)
    for grad, right in zip(grads, exactly(batch, upstream, reduction=reduction).grads, strict=True):
        assert off(grad, right) <= 2e-3
    # Logit gradients must be scaled before the division: an eighth of that number would be zero.
    assert (torch.tensor(1 / classes / rows / 8).half() == 0).all()


@pytest.mark.parametrize("largest", [1.0, 1e4, 1e6])
def test_a_large_weight_of_an_unused_class_costs_float16_gradients_no_digits(device, largest):
    batch = head(device, torch.float16)
    unused = next(c for c in range(101) if c not in batch.target)
    weight = torch.ones(101, device=device)
    weight[unused] = largest
    options = {"reduction": "none", "class_weight": weight}
    grads = batch.grads(batch.loss(chunk_rows=8, **options))
    for grad, right in zip(grads, exactly(batch, **options).grads, strict=True):
        assert off(grad, right) <= 2 * TOLERANCE[torch.float16]


@EVERY_REDUCTION
def test_float16_gradients_with_class_weights_of_no_classes_are_empty(device, reduction):
    batch = head(device, torch.float16, classes=1)
    batch.weight = batch.weight[:0].detach().requires_grad_()
    batch.bias = None
    batch.target = torch.full_like(batch.target, -100)
    loss = batch.loss(reduction=reduction, class_weight=torch.empty(0, device=device))
    hidden, weight = batch.grads(loss)
    assert hidden.shape == batch.hidden.shape
    assert weight.shape == (0, 24)


@EVERY_REDUCTION
def test_float16_gradients_with_large_class_weights_are_accurate(device, reduction):
    batch = head(device, torch.float16)
    weight = torch.full((101,), 1e6, device=device)
    upstream = 1.0 if reduction == "mean" else 1e-6
    loss = batch.loss(reduction=reduction, class_weight=weight, chunk_rows=8)
    right = exactly(batch, upstream, reduction=reduction, class_weight=weight)
    for grad, expected in zip(batch.grads(loss, upstream), right.grads, strict=True):
        assert off(grad, expected) <= 2e-3


@EVERY_DTYPE
@EVERY_REDUCTION
def test_backward_may_run_again_if_the_graph_is_kept(device, dtype, reduction):
    batch = head(device, dtype)
    loss = batch.loss(reduction=reduction, chunk_rows=8)
    expected = exactly(batch, 2.0, reduction=reduction)
    times = (2.0, 1.0, 2.0, 2.0)
    for number, upstream in enumerate(times):
        grads = batch.grads(loss, upstream, retain_graph=number + 1 < len(times))
        for grad, right in zip(grads, expected.grads, strict=True):
            assert off(grad, right * (upstream / 2)) <= TOLERANCE[dtype] * 2


@EVERY_REDUCTION
def test_second_backward_raises_if_the_graph_is_not_kept(device, reduction):
    batch = head(device, torch.float32)
    loss = batch.loss(reduction=reduction)
    batch.grads(loss)
    with pytest.raises(RuntimeError, match="second time"):
        batch.grads(loss)


@EVERY_REDUCTION
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_frozen_tensors_get_no_gradient(device, reduction, frozen):
    batch = head(device, torch.bfloat16)
    right = exactly(batch, reduction=reduction)
    tensors = batch.tensors()
    for index in frozen:
        tensors[index].requires_grad_(False)
    loss = batch.loss(reduction=reduction, chunk_rows=8)
    loss.sum().backward()
    for index, tensor in enumerate(tensors):
        if index in frozen:
            assert tensor.grad is None
        else:
            assert off(tensor.grad, right.grads[index]) <= TOLERANCE[torch.bfloat16]


def products(call):
    """Return the number of matrix products in a call."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        call()
    counted = {event.key: event.count for event in watched.key_averages()}
    return sum(counted.get(name, 0) for name in ("aten::mm", "aten::addmm"))


def test_frozen_tensors_cost_no_matrix_product(device):
    def count(*frozen, grad=True):
        batch = head(device, torch.float32, rows=8, bias=False)
        for index in frozen:
            batch.tensors()[index].requires_grad_(False)

        def call():
            with torch.set_grad_enabled(grad):
                loss = batch.loss(chunk_rows=8)
            if loss.requires_grad:
                loss.backward()

        return products(call)

    assert count() == 3
    assert count(0) == 2
    assert count(1) == 2
    assert count(0, 1) == 1
    assert count(grad=False) == 1


@EVERY_REDUCTION
def test_gradient_of_a_single_tensor_may_be_requested(device, reduction):
    batch = head(device, torch.float32)
    right = exactly(batch, reduction=reduction)
    for index, tensor in enumerate(batch.tensors()):
        loss = batch.loss(reduction=reduction, chunk_rows=8)
        (grad,) = torch.autograd.grad(loss.sum(), tensor)
        assert off(grad, right.grads[index]) <= TOLERANCE[torch.float32]


@EVERY_REDUCTION
def test_second_derivative_is_refused(device, reduction):
    batch = head(device, torch.float64)
    loss = batch.loss(reduction=reduction).sum()
    grads = torch.autograd.grad(loss, batch.tensors(), create_graph=True)
    for grad in grads:
        with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
            torch.autograd.grad(grad.sum(), batch.hidden, retain_graph=True)


@EVERY_REDUCTION
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_pass_gradcheck(device, reduction, bias):
    batch = head(device, torch.float64, rows=5, features=3, classes=4, bias=bias)

    def loss(*tensors):
        hidden, weight = tensors[:2]
        some = tensors[2] if bias else None
        function = torch.ops.ampfuse.linear_cross_entropy
        index = {"none": 0, "mean": 1, "sum": 2}[reduction]
        return function(hidden, weight, batch.target, some, reduction=index, chunk_rows=2)

    torch.autograd.gradcheck(loss, batch.tensors())


@EVERY_REDUCTION
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_through_a_checkpoint_are_exact(device, reduction, use_reentrant):
    batch = head(device, torch.float32)
    right = exactly(batch, 2.0, reduction=reduction)

    def loss(*_):
        return batch.loss(reduction=reduction, chunk_rows=8)

    result = checkpoint(loss, *batch.tensors(), use_reentrant=use_reentrant)
    (2 * result.sum()).backward()
    grads = [tensor.grad for tensor in batch.tensors()]
    for grad, expected in zip(grads, right.grads, strict=True):
        assert off(grad, expected) <= TOLERANCE[torch.float32]


@EVERY_REDUCTION
def test_hooks_may_copy_saved_tensors(device, reduction):
    batch = head(device, torch.float32)
    right = exactly(batch, reduction=reduction)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.t().contiguous() if tensor.dim() == 2 else tensor.clone(),
        lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    ):
        loss = batch.loss(reduction=reduction, chunk_rows=8)
    for grad, expected in zip(batch.grads(loss, 1.0), right.grads, strict=True):
        assert off(grad, expected) <= TOLERANCE[torch.float32]


def test_hidden_states_may_change_only_if_backward_does_not_read_them(device):
    batch = head(device, torch.float32)
    hidden = batch.hidden * 1
    batch.hidden = hidden
    loss = batch.loss(reduction="none").sum()
    hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # If forward computes the gradients, backward does not read the hidden states.
    batch = head(device, torch.float32)
    hidden = batch.hidden * 1
    batch.hidden = hidden
    loss = batch.loss()
    hidden.detach().add_(1)
    loss.backward()


def test_repeated_calls_with_the_same_chunks_give_the_same_bits(device):
    batch = head(device, torch.bfloat16, rows=100)

    def results(**options):
        loss = batch.loss(chunk_rows=32, **options)
        return [loss.detach(), *batch.grads(loss)]

    first = results()
    assert all(torch.equal(a, b) for a, b in zip(first, results(), strict=True))


@EVERY_REDUCTION
def test_chunk_rows_changes_only_the_last_bits(device, reduction):
    batch = head(device, torch.float32, rows=100)
    right = exactly(batch, reduction=reduction)
    for chunk_rows in (1, 3, 32, 99, 100, 1000):
        loss = batch.loss(reduction=reduction, chunk_rows=chunk_rows)
        assert off(loss, right.loss) <= 5e-7
        for grad, expected in zip(batch.grads(loss), right.grads, strict=True):
            assert off(grad, expected) <= 2e-6


@pytest.mark.parametrize("scale", [2.0**16, 2.0**20, 1e30])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("chunk_rows", [8, None])
def test_float16_gradients_stay_in_range_if_backward_gets_no_grad_scale(
    device, reduction, scale, chunk_rows
):
    batch = head(device, torch.float16)
    scale = torch.tensor(scale, device=device)
    loss = batch.loss(reduction=reduction, grad_scale=scale, chunk_rows=chunk_rows)
    for upstream in (1.0, 64.0):
        expected = exactly(batch, upstream, reduction=reduction).grads
        for grad, right in zip(
            batch.grads(loss, upstream, retain_graph=True), expected, strict=True
        ):
            assert off(grad, right) <= TOLERANCE[torch.float16] * 2


def test_upstream_gradient_of_a_power_of_two_causes_no_rounding(device):
    batch = head(device, torch.bfloat16)
    loss = batch.loss(grad_scale=torch.ones((), device=device))
    for grad, larger in zip(
        batch.grads(loss, 1.0, retain_graph=True), batch.grads(loss, 8.0), strict=True
    ):
        assert torch.equal(8 * grad, larger)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradients_that_are_not_requested_are_not_rescaled(wanted):
    batch = head(torch.device("cpu"), torch.float32)
    loss = 3 * batch.loss()
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        torch.autograd.grad(loss, batch.tensors()[wanted], retain_graph=True)
    names = [event.key for event in watched.key_averages() for _ in range(event.count)]
    assert names.count("ampfuse::cross_entropy_rescale_") == 1
