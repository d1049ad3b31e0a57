"""DistributedDataParallel on two ranks gives the bits of one process that averages gradients."""

from functools import partial

import ampfuse
import pytest
import torch
import torch.distributed as dist
from distributed_steps import (
    CLIP,
    OPTIONS,
    OVERFLOWING,
    SCALE,
    STEPS,
    adamw,
    alone,
    assert_like,
    batch,
    by_the_scaler,
    by_torch,
    loss_of,
    model,
    train,
)
from processes import Scenarios
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow
scenario = Scenarios()


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


def ours(params):
    return adamw(params), ampfuse.GradScaler("cpu", SCALE), None


def trained(network, *, autocast=None, parts=1, prepare=None, make=ours, **options):
    """Train a replica; the loss of rank 1 overflows in one step."""
    replica = DistributedDataParallel(network, **options)
    if prepare is not None:
        prepare(replica)
    optimizer, scaler, clip = make(replica.parameters())
    rank = dist.get_rank()

    def backward(step, part):
        loss = loss_of(replica, rank, step, part, autocast)
        overflows = step == OVERFLOWING and rank == 1
        scaler.scale(loss * torch.inf if overflows else loss).backward()

    def set_gradients(step):
        for part in range(parts - 1):
            with replica.no_sync():
                backward(step, part)
        backward(step, parts - 1)

    return train(optimizer, scaler, set_gradients, clip)


AUTOCAST = (torch.float16, torch.bfloat16)


@scenario(*AUTOCAST)
def autocast(dtype):
    return trained(model(), autocast=dtype)


@pytest.mark.parametrize("dtype", AUTOCAST)
def test_ddp_under_autocast_steps_clips_and_skips_as_one_process(dtype):
    expected = alone(autocast=dtype)
    for result in scenario.results("autocast", dtype):
        assert_like(result, expected)


def of_torch(params):
    return torch.optim.AdamW(params, **OPTIONS), torch.amp.GradScaler("cpu", SCALE), by_torch


@scenario(*AUTOCAST)
def with_torch(dtype):
    return trained(model(), autocast=dtype, make=of_torch)


@pytest.mark.parametrize("dtype", AUTOCAST)
def test_ddp_under_autocast_trains_as_with_the_optimizer_and_scaler_of_torch(dtype):
    expected = alone(autocast=dtype)
    for result in scenario.results("with_torch", dtype):
        assert_like(result, expected, tolerance=1e-5)


def zero_redundancy(params):
    return (
        ZeroRedundancyOptimizer(params, ampfuse.AdamW, **OPTIONS),
        ampfuse.GradScaler("cpu", SCALE),
        by_the_scaler,
    )


def zero_redundancy_that_clips(params):
    cls = partial(ampfuse.AdamW, max_grad_norm=CLIP, process_group=dist.group.WORLD)
    return (
        ZeroRedundancyOptimizer(params, cls, **OPTIONS),
        ampfuse.GradScaler("cpu", SCALE),
        None,
    )


ZERO = (zero_redundancy, zero_redundancy_that_clips)


@scenario(*ZERO)
def with_zero(make):
    return trained(model(), autocast=torch.float16, make=make)


@pytest.mark.parametrize("make", ZERO)
def test_ddp_with_zero_redundancy_optimizer_steps_clips_and_skips_as_one_process(make):
    expected = alone(autocast=torch.float16)
    of_all_ranks = {name: expected[name] for name in ("scales", "skipped", "norms", "params")}
    results = scenario.results("with_zero", make)
    for result in results:
        assert_like(result, of_all_ranks, tolerance=1e-5)
    assert sum(len(result["exp_avg"]) for result in results) == len(expected["exp_avg"])


@scenario(torch.float16, torch.bfloat16)
def low_parameters(dtype):
    return trained(model().to(dtype))


@pytest.mark.parametrize("dtype", AUTOCAST)
def test_ddp_with_16_bit_parameters_steps_their_masters_as_one_process(dtype):
    expected = alone(network=model().to(dtype))
    for result in scenario.results("low_parameters", dtype):
        assert_like(result, expected)


@scenario(*AUTOCAST)
def accumulation(dtype):
    return trained(model(), autocast=dtype, parts=3)


@pytest.mark.parametrize("dtype", AUTOCAST)
def test_ddp_accumulates_under_no_sync_as_one_process(dtype):
    expected = alone(autocast=dtype, parts=3)
    for result in scenario.results("accumulation", dtype):
        assert_like(result, expected)


KINDS = {
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True, "parts": 2},
    "both": {"static_graph": True, "gradient_as_bucket_view": True},
}


@scenario(*KINDS)
def with_options(name):
    return trained(model(), **KINDS[name])


@pytest.mark.parametrize("name", KINDS)
def test_ddp_with_static_graph_or_bucket_views_steps_as_one_process(name):
    expected = alone(parts=KINDS[name].get("parts", 1))
    for result in scenario.results("with_options", name):
        assert_like(result, expected)


class WithBranches(nn.Module):
    """A model with a layer that is never used, and one that the data of some ranks use."""

    def __init__(self):
        super().__init__()
        self.body = model()
        self.unused, self.sometimes = nn.Linear(3, 3), nn.Linear(6, 6)

    def forward(self, inputs):
        return self.body(self.sometimes(inputs) if inputs.sum() > 0 else inputs)


@scenario("branches")
def find_unused(_):
    return trained(WithBranches(), find_unused_parameters=True)


def test_ddp_with_parameters_unused_on_one_or_all_ranks_steps_as_one_process():
    uses = [sum(batch(rank, step)[0].sum() > 0 for rank in range(2)) for step in range(STEPS)]
    assert uses == [0, 0, 1, 1]  # ranks with such data in each step
    network = WithBranches()
    expected = alone(network=network)
    assert network.unused.weight.grad is None
    assert len(expected["exp_avg"]) == len(list(network.parameters())) - 2  # without `unused`
    for result in scenario.results("find_unused", "branches"):
        assert_like(result, expected)


def compressed(dtype):
    """Return the average of gradients that are sent in a 16-bit dtype."""
    return lambda grads: sum(grad.to(dtype) / len(grads) for grad in grads).float()


HOOKS = {
    "bf16_compress_hook": compressed(torch.bfloat16),
    "fp16_compress_hook": compressed(torch.float16),
}


@scenario(*HOOKS)
def hook(name):
    def register(replica):
        replica.register_comm_hook(None, getattr(default_hooks, name))

    return trained(model(), prepare=register)


@pytest.mark.parametrize("name", HOOKS)
def test_ddp_with_compressed_gradients_steps_as_one_process_that_rounds_them(name):
    expected = alone(average=HOOKS[name])
    for result in scenario.results("hook", name):
        assert_like(result, expected)


@scenario("full rank")
def power_sgd(_):
    """Compress gradients from the step after the overflow on."""

    def register(replica):
        state = PowerSGDState(None, 8, start_powerSGD_iter=OVERFLOWING + 1, min_compression_rate=0)
        replica.register_comm_hook(state, powerSGD_hook)

    return trained(model(), prepare=register)


def test_ddp_with_power_sgd_of_full_rank_steps_as_one_process():
    expected = alone()
    for result in scenario.results("power_sgd", "full rank"):
        assert_like(result, expected, tolerance=1e-5)
        with pytest.raises(AssertionError):
            assert_like(result, expected)  # it was compressed
