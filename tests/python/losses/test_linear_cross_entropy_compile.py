"""Tests of linear_cross_entropy inside torch.compile, CUDA graphs and autocast."""

from dataclasses import replace

import ampfuse
import pytest
import torch
from cuda_graphs import capture
from linear_reference import TOLERANCE, check_grads, exactly, head, off
from torch.profiler import ProfilerActivity, profile

FLOAT, BFLOAT16, HALF = torch.float32, torch.bfloat16, torch.float16
# Each dtype, each reduction, and each option that changes the operators' results.
CALLS = {
    "mean": (FLOAT, {"chunk_rows": 8}),
    "sum of float16": (HALF, {"reduction": "sum", "chunk_rows": 8}),
    "rows of bfloat16": (BFLOAT16, {"reduction": "none", "chunk_rows": 8}),
    "smoothing": (FLOAT, {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0}),
    "denominator": (FLOAT, {"denominator": 7.0, "grad_scale": 8.0}),
    "metrics": (FLOAT, {"return_metrics": True}),
    "16-bit logits": (BFLOAT16, {"logits_dtype": BFLOAT16}),
    "tiles": (FLOAT, {"chunk_classes": 32}),
    "tiles of bfloat16": (BFLOAT16, {"chunk_classes": 32}),
}
EVERY_CALL = pytest.mark.parametrize(("dtype", "options"), CALLS.values(), ids=list(CALLS))


def step_of(**options):
    def step(hidden, weight, bias, target):
        return ampfuse.linear_cross_entropy(hidden * 2, weight, target, bias, **options)

    return step


def results_of(step, batch, upstream):
    """Return the loss, the metrics if there are any, and the gradients."""
    loss = step(batch.hidden, batch.weight, batch.bias, batch.target)
    loss, metrics = loss if isinstance(loss, tuple) else (loss, [])
    return [loss, *metrics, *batch.grads(loss, upstream)]


@EVERY_CALL
def test_fully_compiled_step_gives_the_same_bits_as_eager(device, fresh_compiler, dtype, options):
    batch = head(device, dtype)
    compiled = torch.compile(step_of(**options), fullgraph=True, backend="aot_eager")
    for upstream in (1.0, 3.0):
        found = results_of(compiled, batch, upstream)
        expected = results_of(step_of(**options), batch, upstream)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected)), upstream


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("reduction", "chunk_rows"), [("mean", 8), ("sum", None), ("none", None)])
def test_step_is_compiled_once_for_any_number_of_rows(device, reduction, chunk_rows):
    options = {"reduction": reduction, "chunk_rows": chunk_rows, "label_smoothing": 0.1}
    compiled = torch.compile(step_of(**options), fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (21, 5, 8, 64):
            batch = head(device, BFLOAT16, rows=rows)
            found = results_of(compiled, batch, 1.0)
            assert all(map(torch.equal, found, results_of(step_of(**options), batch, 1.0))), rows


def test_compiled_backward_adds_the_weight_gradient_to_the_buffer(device, fresh_compiler):
    batch = head(device, FLOAT)
    buffer = torch.ones(101, 24, device=device)

    @torch.compile(fullgraph=True)
    def step(hidden, weight, bias, target, buffer):
        return ampfuse.linear_cross_entropy(hidden, weight, target, bias, accumulate_into=buffer)

    loss = step(batch.hidden, batch.weight, batch.bias, batch.target, buffer)
    assert (buffer == 1).all()
    (2 * loss).backward()
    right = exactly(batch, 2.0)
    assert batch.weight.grad is None
    assert off(buffer - 1, right.grads[1]) <= TOLERANCE[FLOAT] * 2
    assert off(batch.hidden.grad, right.grads[0]) <= TOLERANCE[FLOAT] * 2


# --- CUDA graphs, which need a step that never waits for the GPU ----------------------------------

# Operators for which the host of a GPU would wait.
WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}


def test_forward_calls_no_operator_that_would_sync_the_host():
    for call, (dtype, options) in CALLS.items():
        batch = head(torch.device("cpu"), dtype)
        with profile(activities=[ProfilerActivity.CPU]) as watched:
            batch.loss(**options)
        assert WAITS & {event.key for event in watched.key_averages()} == set(), call


@pytest.mark.needs_cuda
@EVERY_CALL
def test_graph_replay_equals_a_call_that_does_not_sync_the_host(waits_are_errors, dtype, options):
    cuda = torch.device("cuda")
    batch = head(cuda, dtype)

    def step():
        return results_of(step_of(**options), batch, 1.0)

    graph, results = capture(step)
    for seed in (1, 2):
        with torch.no_grad():
            batch.hidden.copy_(head(cuda, dtype, seed=seed).hidden)
        graph.replay()
        replayed = [result.clone() for result in results]
        torch.cuda.synchronize()
        waits_are_errors()
        expected = step()
        torch.cuda.set_sync_debug_mode("default")
        assert all(map(torch.equal, replayed, expected))


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("cast", [BFLOAT16, HALF])
def test_autocast_sets_the_dtype_of_products_but_not_of_gradients(device, backend, reduction, cast):
    """Gradients of float32 tensors are not rounded to the dtype of autocast."""
    batch = head(device, FLOAT)

    def step(hidden, weight, bias, target):
        with torch.autocast(device.type, cast):
            return ampfuse.linear_cross_entropy(
                hidden, weight, target, bias, reduction=reduction, chunk_rows=8, logits_dtype=FLOAT
            )

    if backend is not None:
        step = torch.compile(step, fullgraph=True, backend=backend)
    loss, *grads = results_of(step, batch, 1.0)
    hidden, weight = (tensor.detach().to(cast).float() for tensor in (batch.hidden, batch.weight))
    rounded = replace(batch, hidden=hidden, weight=weight).as_leaves(FLOAT)
    right = exactly(rounded, reduction=reduction)
    assert loss.dtype == FLOAT
    assert off(loss, right.loss) <= 1e-6
    assert all(grad.dtype == FLOAT for grad in grads)
    check_grads(grads, right.grads, TOLERANCE[cast])
    if reduction != "none":
        assert all((grad != grad.to(cast).float()).any() for grad in grads[:2])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_backward_outside_autocast_gives_the_same_bits_as_inside(device, reduction):
    batch = head(device, FLOAT)
    with torch.autocast(device.type, BFLOAT16):
        inside = batch.loss(reduction=reduction)
        expected = batch.grads(inside, retain_graph=True)
    assert all(map(torch.equal, batch.grads(inside), expected))


def test_16_bit_hidden_states_may_meet_a_float32_weight_under_autocast(device):
    batch = head(device, FLOAT)
    batch.hidden = batch.hidden.detach().bfloat16().requires_grad_()
    with torch.autocast(device.type, BFLOAT16):
        loss = batch.loss()
    assert [grad.dtype for grad in batch.grads(loss)] == [BFLOAT16, FLOAT, FLOAT]


def test_autocast_does_not_change_float64_losses(device):
    batch = head(device, torch.float64)
    expected = batch.loss()
    with torch.autocast(device.type, BFLOAT16):
        assert torch.equal(batch.loss(), expected)
