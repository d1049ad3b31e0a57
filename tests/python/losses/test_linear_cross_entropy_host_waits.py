"""Tests that linear_cross_entropy does not synchronise the host, and that CUDA graphs replay it."""

import pytest
import torch
from cuda_graphs import capture
from linear_reference import head
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
# Operators for which the host of a GPU would wait.
WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"}
CALLS = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "half": {"dtype": torch.float16},
    "bfloat16": {"dtype": torch.bfloat16},
    "rounded": {"dtype": torch.bfloat16, "logits_dtype": torch.bfloat16},
    "smoothing": {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0},
    "denominator": {"denominator": 7.0, "grad_scale": 8.0},
    "metrics": {"return_metrics": True},
}
EVERY_CALL = pytest.mark.parametrize("options", CALLS.values(), ids=list(CALLS))


class Step:
    """A call with its backward, which may be repeated on the same memory."""

    def __init__(self, device, dtype=torch.float32, **options):
        self.batch = head(device, dtype)
        self.options = {"chunk_rows": 8} | options

    def forward(self):
        loss = self.batch.loss(**self.options)
        return loss[0] if isinstance(loss, tuple) else loss

    def __call__(self):
        loss = self.forward()
        return [loss, *self.batch.grads(loss)]


@EVERY_CALL
def test_forward_calls_no_operator_that_would_sync_the_host(options):
    step = Step(CPU, **options)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        step.forward()
    assert WAITS & {event.key for event in watched.key_averages()} == set()


@pytest.mark.needs_cuda
@EVERY_CALL
def test_call_and_backward_do_not_sync_the_host(waits_are_errors, options):
    step = Step(CUDA, **options)
    step()
    torch.cuda.synchronize()
    waits_are_errors()

    step()


@pytest.mark.needs_cuda
@EVERY_CALL
def test_graph_replay_equals_a_call_with_the_current_contents_of_memory(options):
    step = Step(CUDA, **options)
    graph, results = capture(step)
    for seed in (1, 2):
        with torch.no_grad():
            step.batch.hidden.copy_(head(CUDA, step.batch.hidden.dtype, seed=seed).hidden)
        graph.replay()
        replayed = [result.clone() for result in results]
        assert all(map(torch.equal, replayed, step()))
