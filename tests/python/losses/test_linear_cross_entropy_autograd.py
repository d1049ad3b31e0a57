"""Tests of linear_cross_entropy's backward: upstream gradients, repeated calls, frozen tensors."""

import pytest
import torch
from linear_reference import (
    EVERY_DTYPE,
    EVERY_REDUCTION,
    EVERY_WAY,
    TOLERANCE,
    check,
    check_grads,
    exactly,
    head,
    off,
)
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

FLOAT = torch.float32
HALF = torch.float16


@pytest.mark.vectorised
@EVERY_DTYPE
@EVERY_WAY
def test_any_upstream_gradient_gives_the_exact_gradients(device, dtype, how):
    for upstream in (0.0, 1.0, -3.0, 0.1, 1024.0):
        if dtype == HALF and how["reduction"] != "mean":
            upstream /= 64  # so that float16 can hold the gradients
        check(head(device, dtype), upstream=upstream, **how)
    if how["reduction"] == "none":
        upstream = torch.randn(21, generator=torch.Generator().manual_seed(9)).to(device)
        check(head(device, dtype), upstream=upstream, **how)


@EVERY_DTYPE
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_upstream_gradient_may_equal_grad_scale_or_differ_from_it(device, dtype, reduction):
    # Equal numbers, and ratios that are a power of two or not.
    for wish, upstream in [(1, 1), (3, 3), (1024, 1024), (1, 1024), (3, 1), (3, 1024), (1024, 3)]:
        # The upstream gradient of a row is then 4 at most, so float16 can hold the gradients.
        factor = 2.0**-8 if dtype == HALF and reduction == "sum" else 1.0
        grad_scale = torch.tensor(wish * factor, device=device)
        options = {"reduction": reduction, "chunk_rows": 8, "grad_scale": grad_scale}
        check(head(device, dtype), upstream=upstream * factor, tolerance=2, **options)


@pytest.mark.parametrize("wish", [0.0, float("inf"), float("nan")])
def test_grad_scale_of_zero_infinity_or_nan_does_not_change_gradients(device, wish):
    check(head(device, FLOAT), grad_scale=wish, upstream=3.0)


def test_float16_gradients_do_not_underflow_for_thousands_of_rows(device):
    """Divided by the rows, a probability is 1.2e-7: two of float16's smallest steps."""
    rows, features, classes, scale = 8192, 16, 1000, 65536.0
    batch = head(device, HALF, rows, features, classes, bias=False)
    batch.weight.detach().mul_(0.01)
    # Logit gradients must be scaled before the division: an eighth of that number would be zero.
    assert (torch.tensor(1 / classes / rows / 8).half() == 0).all()
    right = exactly(batch, scale, reduction="sum").grads
    counted = (batch.target != -100).sum()
    for options in (
        {"reduction": "mean"},
        {"reduction": "mean", "grad_scale": scale},
        {"reduction": "sum"},
        {"reduction": "sum", "grad_scale": scale},
        {"reduction": "none"},
    ):
        is_mean = options["reduction"] == "mean"
        loss = batch.loss(chunk_rows=1000, **options)
        grads = batch.grads(loss, scale if is_mean else scale / rows)
        expected = [grad / (counted if is_mean else rows) for grad in right]
        check_grads(grads, expected, 2e-3, str(options))


@pytest.mark.parametrize("largest", [1.0, 1e4, 1e6])
def test_a_large_weight_of_an_unused_class_costs_float16_gradients_no_digits(device, largest):
    batch = head(device, HALF)
    unused = next(c for c in range(101) if c not in batch.target)
    weight = torch.ones(101, device=device)
    weight[unused] = largest
    options = {"reduction": "none", "class_weight": weight}
    grads = batch.grads(batch.loss(chunk_rows=8, **options))
    check_grads(grads, exactly(batch, **options).grads, 2 * TOLERANCE[HALF])


@EVERY_REDUCTION
def test_float16_gradients_with_class_weights_of_no_classes_are_empty(device, reduction):
    batch = head(device, HALF, classes=1, bias=False)
    batch.weight = batch.weight[:0].detach().requires_grad_()
    batch.target = torch.full_like(batch.target, -100)
    loss = batch.loss(reduction=reduction, class_weight=torch.empty(0, device=device))
    hidden, weight = batch.grads(loss)
    assert hidden.shape == batch.hidden.shape
    assert weight.shape == (0, 24)


@EVERY_REDUCTION
def test_float16_gradients_with_large_class_weights_are_accurate(device, reduction):
    batch = head(device, HALF)
    weight = torch.full((101,), 1e6, device=device)
    upstream = 1.0 if reduction == "mean" else 1e-6
    loss = batch.loss(reduction=reduction, class_weight=weight, chunk_rows=8)
    right = exactly(batch, upstream, reduction=reduction, class_weight=weight)
    check_grads(batch.grads(loss, upstream), right.grads, 2e-3)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**20, 1e30])
def test_float16_gradients_stay_in_range_if_backward_gets_no_grad_scale(device, scale):
    batch = head(device, HALF)
    for reduction in ("mean", "sum"):
        for chunk_rows in (8, None):
            grad_scale = torch.tensor(scale, device=device)
            loss = batch.loss(reduction=reduction, grad_scale=grad_scale, chunk_rows=chunk_rows)
            for upstream in (1.0, 64.0):
                grads = batch.grads(loss, upstream, retain_graph=True)
                right = exactly(batch, upstream, reduction=reduction).grads
                check_grads(grads, right, TOLERANCE[HALF] * 2, f"{reduction}, {chunk_rows}")


def test_upstream_gradient_of_a_power_of_two_causes_no_rounding(device):
    batch = head(device, torch.bfloat16)
    loss = batch.loss(grad_scale=torch.ones((), device=device))
    grads = batch.grads(loss, 1.0, retain_graph=True)
    for grad, larger in zip(grads, batch.grads(loss, 8.0), strict=True):
        assert torch.equal(8 * grad, larger)


# --- several backward passes, or parts of one -----------------------------------------------------


@EVERY_WAY
@pytest.mark.parametrize("dtype", [FLOAT, torch.bfloat16])
def test_backward_may_run_again_only_if_the_graph_is_kept(device, dtype, how):
    batch = head(device, dtype)
    loss = batch.loss(**how)
    right = exactly(batch, 2.0, reduction=how["reduction"]).grads
    for is_kept, upstream in [(True, 2.0), (True, 1.0), (True, 2.0), (False, 2.0)]:
        grads = batch.grads(loss, upstream, retain_graph=is_kept)
        check_grads(grads, [grad * (upstream / 2) for grad in right], TOLERANCE[dtype] * 2)
    with pytest.raises(RuntimeError, match="second time"):
        batch.grads(loss)


@EVERY_WAY
@pytest.mark.parametrize("dtype", [FLOAT, torch.bfloat16])
def test_frozen_tensors_get_no_gradient(device, dtype, how):
    right = exactly(head(device, dtype), reduction=how["reduction"])
    for frozen in [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)]:
        batch = head(device, dtype)
        for index in frozen:
            batch.tensors()[index].requires_grad_(False)
        batch.loss(**how).sum().backward()
        for index, tensor in enumerate(batch.tensors()):
            assert (tensor.grad is None) == (index in frozen), (frozen, index)
            if index not in frozen:
                assert off(tensor.grad, right.grads[index]) <= TOLERANCE[dtype], (frozen, index)


def counted(call):
    """Return how often each operator is called."""
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        call()
    return {event.key: event.count for event in watched.key_averages()}


def test_frozen_tensors_cost_no_matrix_product(device):
    def products(*frozen, grad=True):
        batch = head(device, FLOAT, rows=8, bias=False)
        for index in frozen:
            batch.tensors()[index].requires_grad_(False)

        def call():
            with torch.set_grad_enabled(grad):
                loss = batch.loss(chunk_rows=8)
            if loss.requires_grad:
                loss.backward()

        counts = counted(call)
        return sum(counts.get(name, 0) for name in ("aten::mm", "aten::addmm"))

    assert products() == 3
    assert products(0) == 2
    assert products(1) == 2
    assert products(0, 1) == 1
    assert products(grad=False) == 1


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_gradients_that_are_not_requested_are_not_rescaled(wanted):
    batch = head(torch.device("cpu"), FLOAT)
    loss = 3 * batch.loss()
    counts = counted(lambda: torch.autograd.grad(loss, batch.tensors()[wanted]))
    assert counts["ampfuse::cross_entropy_rescale_"] == 1


@EVERY_WAY
def test_gradient_of_a_single_tensor_may_be_requested(device, how):
    batch = head(device, FLOAT)
    right = exactly(batch, reduction=how["reduction"])
    for index, tensor in enumerate(batch.tensors()):
        (grad,) = torch.autograd.grad(batch.loss(**how).sum(), tensor)
        assert off(grad, right.grads[index]) <= TOLERANCE[FLOAT]


@EVERY_WAY
def test_second_derivative_is_refused(device, how):
    batch = head(device, torch.float64)
    loss = batch.loss(**how).sum()
    for grad in torch.autograd.grad(loss, batch.tensors(), create_graph=True):
        with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
            torch.autograd.grad(grad.sum(), batch.hidden, retain_graph=True)


@EVERY_REDUCTION
def test_gradients_pass_gradcheck(device, reduction):
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    for has_bias in (True, False):
        batch = head(device, torch.float64, rows=5, features=3, classes=4, bias=has_bias)

        def loss(hidden, weight, bias=None, target=batch.target):
            return torch.ops.ampfuse.linear_cross_entropy(
                hidden, weight, target, bias, reduction=number, chunk_rows=2
            )

        torch.autograd.gradcheck(loss, batch.tensors())


# --- what autograd saves --------------------------------------------------------------------------


@EVERY_WAY
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_through_a_checkpoint_are_exact(device, how, use_reentrant):
    batch = head(device, FLOAT)
    result = checkpoint(lambda *_: batch.loss(**how), *batch.tensors(), use_reentrant=use_reentrant)
    (2 * result.sum()).backward()
    grads = [tensor.grad for tensor in batch.tensors()]
    right = exactly(batch, 2.0, reduction=how["reduction"]).grads
    check_grads(grads, right, TOLERANCE[FLOAT])


@EVERY_WAY
def test_hooks_may_copy_saved_tensors(device, how):
    batch = head(device, FLOAT)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.t().contiguous() if tensor.dim() == 2 else tensor.clone(),
        lambda tensor: tensor.t() if tensor.dim() == 2 else tensor,
    ):
        loss = batch.loss(**how)
    right = exactly(batch, reduction=how["reduction"]).grads
    check_grads(batch.grads(loss), right, TOLERANCE[FLOAT])


def test_hidden_states_may_change_only_if_backward_does_not_read_them(device):
    batch = head(device, FLOAT)
    batch.hidden = batch.hidden * 1
    loss = batch.loss(reduction="none").sum()
    batch.hidden.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    # If forward computes the gradients, backward does not read the hidden states.
    loss = batch.loss()
    batch.hidden.detach().add_(1)
    loss.backward()


def test_repeated_calls_with_the_same_chunks_give_the_same_bits(device):
    batch = head(device, torch.bfloat16, rows=100)
    results = []
    for _ in range(2):
        loss = batch.loss(chunk_rows=32)
        results.append([loss.detach(), *batch.grads(loss)])
    assert all(map(torch.equal, *results))


@EVERY_REDUCTION
def test_chunk_rows_changes_only_the_last_bits(device, reduction):
    batch = head(device, FLOAT, rows=100)
    right = exactly(batch, reduction=reduction)
    for chunk_rows in (1, 3, 32, 99, 100, 1000):
        loss = batch.loss(reduction=reduction, chunk_rows=chunk_rows)
        assert off(loss, right.loss) <= 5e-7, chunk_rows
        check_grads(batch.grads(loss), right.grads, 2e-6, chunk_rows)
