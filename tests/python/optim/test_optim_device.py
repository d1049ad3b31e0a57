"""A step allocates no memory, does not make the host wait, and may be captured in a CUDA graph."""

import copy

import ampfuse
import pytest
import torch
from ampfuse.gradients.devices import move_to
from optim_models import (
    EVERY_KIND,
    assert_same_bits,
    assert_same_state,
    clones,
    feed,
    overwrite,
    parameters,
    state_values,
)
from torch.nn import Parameter
from torch.profiler import ProfilerActivity, profile

CUDA = torch.device("cuda")


def allocated(events):
    """Return the bytes of all allocations, including those that were freed at once."""
    return sum(max(0, event.self_cpu_memory_usage) for event in events)


@EVERY_KIND
def test_step_allocates_only_a_few_scalars(dtype, options):
    params = [Parameter(torch.ones(2**16, dtype=dtype)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = ampfuse.AdamW(params, max_grad_norm=1.0, **options)
    optimizer.grad_scale = torch.tensor(4.0)
    optimizer.step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        optimizer.step()
    assert 0 < allocated(watched.events()) < 1024


def test_temporary_tensors_are_counted_as_allocated():
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        torch.ones(2**16).clone()
    assert allocated(watched.events()) >= 2 * 4 * 2**16


@pytest.mark.needs_cuda
@EVERY_KIND
def test_step_does_not_sync_the_host(dtype, options, waits_are_errors):
    params = parameters(CUDA, dtype)
    optimizer = ampfuse.AdamW(params, max_grad_norm=1.0, **options)
    feed(params, 0)
    optimizer.step()
    feed(params, 1)
    optimizer.grad_scale = torch.tensor(4.0, device="cuda")
    waits_are_errors()
    optimizer.step()
    optimizer.found_inf = torch.ones((), device="cuda")
    optimizer.step()
    assert optimizer.grad_norm.device.type == "cuda"


def test_host_waits_only_for_copies_to_the_cpu():
    class Scalar:
        device = torch.device("xla")  # differs from every target device

        def to(self, device, non_blocking):
            return device, non_blocking

    for name in ("cpu", "cuda", "meta"):
        target = torch.device(name)
        assert move_to(Scalar(), target) == (target, name != "cpu")


class Twins:
    """Two equal models with equal optimizers; the steps of the first are replayed from a graph."""

    def __init__(self, dtype, **options):
        self.params, self.others = parameters(CUDA, dtype), parameters(CUDA, dtype)
        self.rates = [torch.tensor(1e-3, device=CUDA) for _ in range(2)]
        self.flags = [torch.zeros((), device=CUDA) for _ in range(2)]
        scale = torch.tensor(4.0, device=CUDA)
        self.optimizer, self.reference = (
            ampfuse.AdamW(params, lr=rate, max_grad_norm=1.0, **options)
            for params, rate in zip((self.params, self.others), self.rates, strict=True)
        )
        for optimizer, flag in zip((self.optimizer, self.reference), self.flags, strict=True):
            optimizer.grad_scale, optimizer.found_inf = scale, flag
        self.grads = self.take_a_step(0)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.optimizer.step()

    def take_a_step(self, step):
        """Take an ordinary step of both models and return the gradients of the first."""
        for params, optimizer in ((self.params, self.optimizer), (self.others, self.reference)):
            feed(params, step, scale=4.0)
            optimizer.step()
        return [param.grad for param in self.params]

    def replay(self, step, lr=1e-3, found_inf=0.0):
        """Step both models, the first by replaying the graph, and compare them bit by bit."""
        feed(self.others, step, scale=4.0)
        for grad, other in zip(self.grads, self.others, strict=True):
            grad.copy_(other.grad)
        for rate, flag in zip(self.rates, self.flags, strict=True):
            rate.fill_(lr)
            flag.fill_(found_inf)
        self.graph.replay()
        self.reference.step()
        assert_same_bits(self.params, self.others)
        assert_same_bits(self.grads, [other.grad for other in self.others])
        assert_same_bits([self.optimizer.grad_norm], [self.reference.grad_norm])
        assert_same_state(self.optimizer, state_values(self.reference))


@pytest.mark.needs_cuda
@EVERY_KIND
def test_replayed_steps_equal_eager_ones_also_skipped_ones_and_those_after_a_load(dtype, options):
    twins = Twins(dtype, **options)
    for step, (lr, found_inf) in enumerate(
        [(1e-3, 0.0), (0.25, 0.0), (1e-2, 1.0), (1e-2, 0.0), (0.25, 2.0)], start=1
    ):
        twins.replay(step, lr, found_inf)
    assert twins.optimizer.state[twins.params[0]]["step"] == 4
    saved = copy.deepcopy(twins.reference.state_dict())
    values = clones(twins.others)
    twins.replay(6)

    for params in (twins.params, twins.others):
        overwrite(params, values)
    for optimizer, rate in zip((twins.optimizer, twins.reference), twins.rates, strict=True):
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = rate  # the tensor that the graph reads
    twins.replay(7)
