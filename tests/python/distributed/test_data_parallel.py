"""Data parallel models on two ranks train as one process that averages the ranks' gradients.

They are those of DistributedDataParallel (DDP), and of FullyShardedDataParallel (FSDP1), whose
shards are plain tensors, so that scaler and optimizer get the group of all ranks.
"""

from functools import partial

import ampfuse
import distributed_steps as steps
import pytest
import torch
import torch.distributed as dist
from processes import Scenarios
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow
scenario = Scenarios()
HALF, BFLOAT16 = torch.float16, torch.bfloat16


def ours(params):
    return steps.adamw(params), ampfuse.GradScaler("cpu", steps.SCALE), None


def of_torch(params):
    optimizer = torch.optim.AdamW(params, **steps.OPTIONS)
    return optimizer, torch.amp.GradScaler("cpu", steps.SCALE), steps.by_torch


def trained(network, *, autocast=None, parts=1, hook=None, make=ours, **options):
    """Train a replica; the loss of rank 1 overflows in one step."""
    replica = DistributedDataParallel(network, **options)
    if hook is not None:
        replica.register_comm_hook(*hook)
    optimizer, scaler, clip = make(replica.parameters())
    rank = dist.get_rank()

    def backward(step, part):
        loss = steps.loss_of(replica, rank, step, part, autocast)
        overflows = step == steps.OVERFLOWING and rank == 1
        scaler.scale(loss * torch.inf if overflows else loss).backward()

    def set_gradients(step):
        for part in range(parts - 1):
            with replica.no_sync():
                backward(step, part)
        backward(step, parts - 1)

    return steps.train(optimizer, scaler, set_gradients, clip)


# The dtype of parameters, the one in which gradients are sent, and options of `trained`. All but
# torch's optimizer give the same bits as one process.
CASES = {
    "under autocast to float16": {"autocast": HALF},
    "under autocast to bfloat16": {"autocast": BFLOAT16},
    "with torch's optimizer": {"autocast": HALF, "make": of_torch},
    "with float16 parameters": {"dtype": HALF},
    "with bfloat16 parameters": {"dtype": BFLOAT16},
    "that accumulates under no_sync": {"autocast": HALF, "parts": 3},
    "with a static graph": {"static_graph": True},
    "with bucket views": {"gradient_as_bucket_view": True, "parts": 2},
    "with a static graph and bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "that sends bfloat16": {"sent": BFLOAT16},
    "that sends float16": {"sent": HALF},
}
HOOKS = {BFLOAT16: default_hooks.bf16_compress_hook, HALF: default_hooks.fp16_compress_hook}


@scenario(*CASES)
def replicated(case):
    options = dict(CASES[case])
    network = steps.model().to(options.pop("dtype", None))
    sent = options.pop("sent", None)
    return trained(network, hook=sent and (None, HOOKS[sent]), **options)


@pytest.mark.parametrize("case", CASES)
def test_ddp_steps_clips_and_skips_as_one_process(case):
    options = CASES[case]
    given = {name: options[name] for name in ("autocast", "parts") if name in options}
    if sent := options.get("sent"):
        given["average"] = lambda grads: sum(grad.to(sent) / len(grads) for grad in grads).float()
    expected = steps.alone(steps.model().to(options.get("dtype")), **given)
    for result in scenario.results("replicated", case):
        steps.assert_like(result, expected, tolerance=1e-5 if "make" in options else None)


def zero_redundancy(params):
    optimizer = ZeroRedundancyOptimizer(params, ampfuse.AdamW, **steps.OPTIONS)
    return optimizer, ampfuse.GradScaler("cpu", steps.SCALE), steps.by_the_scaler


def zero_redundancy_that_clips(params):
    cls = partial(ampfuse.AdamW, max_grad_norm=steps.CLIP, process_group=dist.group.WORLD)
    optimizer = ZeroRedundancyOptimizer(params, cls, **steps.OPTIONS)
    return optimizer, ampfuse.GradScaler("cpu", steps.SCALE), None


ZERO = (zero_redundancy, zero_redundancy_that_clips)


@scenario(*ZERO)
def with_zero(make):
    return trained(steps.model(), autocast=HALF, make=make)


@pytest.mark.parametrize("make", ZERO)
def test_ddp_with_zero_redundancy_optimizer_steps_clips_and_skips_as_one_process(make):
    expected = steps.alone(autocast=HALF)
    of_all_ranks = {name: expected[name] for name in ("scales", "skipped", "norms", "params")}
    results = scenario.results("with_zero", make)
    for result in results:
        steps.assert_like(result, of_all_ranks, tolerance=1e-5)
    assert sum(len(result["exp_avg"]) for result in results) == len(expected["exp_avg"])


class WithBranches(nn.Module):
    """A model with a layer that is never used, and one that the data of some ranks use."""

    def __init__(self):
        super().__init__()
        self.body = steps.model()
        self.unused, self.sometimes = nn.Linear(3, 3), nn.Linear(6, 6)

    def forward(self, inputs):
        return self.body(self.sometimes(inputs) if inputs.sum() > 0 else inputs)


@scenario("branches")
def find_unused(_):
    return trained(WithBranches(), find_unused_parameters=True)


def test_ddp_with_parameters_unused_on_one_or_all_ranks_steps_as_one_process():
    uses = [[steps.batch(rank, step)[0].sum() > 0 for rank in range(2)] for step in range(4)]
    assert [sum(of_ranks) for of_ranks in uses] == [0, 0, 1, 1]  # ranks with such data in each step
    network = WithBranches()
    expected = steps.alone(network)
    assert network.unused.weight.grad is None
    assert len(expected["exp_avg"]) == len(list(network.parameters())) - 2  # without `unused`
    for result in scenario.results("find_unused", "branches"):
        steps.assert_like(result, expected)


@scenario("full rank")
def power_sgd(_):
    """Compress gradients from the step after the overflow on."""
    begin = {"start_powerSGD_iter": steps.OVERFLOWING + 1}
    state = PowerSGDState(None, 8, **begin, min_compression_rate=0)
    return trained(steps.model(), hook=(state, powerSGD_hook))


def test_ddp_with_power_sgd_of_full_rank_steps_as_one_process():
    expected = steps.alone()
    for result in scenario.results("power_sgd", "full rank"):
        steps.assert_like(result, expected, tolerance=1e-5)
        with pytest.raises(AssertionError):
            steps.assert_like(result, expected)  # it was compressed


def sharded(use_orig_params, dtype):
    """Return a model of which each layer is sharded by itself, by FSDP1."""
    options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    if dtype is not None:
        options["mixed_precision"] = MixedPrecision(dtype, reduce_dtype=torch.float32)
    network = steps.model()
    for index in (0, 2):
        network[index] = FullyShardedDataParallel(network[index], **options)
    return FullyShardedDataParallel(network, **options)


def joined(tensors):
    """Return the shards of all ranks as one vector. Each rank has a shard of each parameter."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [tensor.detach().flatten() for tensor in tensors])
    return [torch.cat([shard for shards in zip(*of_ranks, strict=True) for shard in shards])]


# Parameters are flat or original ones, have a dtype, and are clipped by the step or by FSDP.
SHARDED = {
    "flat": (False, None, "step"),
    "flat, bfloat16": (False, BFLOAT16, "step"),
    "original": (True, None, "step"),
    "original, bfloat16": (True, BFLOAT16, "step"),
    "flat, clipped by FSDP": (False, None, "FSDP"),
    "original, clipped by FSDP": (True, None, "FSDP"),
}


@scenario(*SHARDED)
def fully_sharded(case):
    """Train a sharded model; in one step a gradient overflows in the shard of rank 1."""
    use_orig_params, dtype, clips = SHARDED[case]
    network, group = sharded(use_orig_params, dtype), dist.group.WORLD

    def by_fsdp(params, scaler, optimizer):
        scaler.unscale_(optimizer)
        return network.clip_grad_norm_(steps.CLIP)

    clip = by_fsdp if clips == "FSDP" else None
    optimizer = steps.adamw(network.parameters(), clip, process_group=group)
    scaler = ampfuse.GradScaler("cpu", steps.SCALE, process_group=group)

    def set_gradients(step):
        scaler.scale(steps.loss_of(network, dist.get_rank(), step)).backward()
        if step == steps.OVERFLOWING and dist.get_rank() == 1:
            steps.overflow(network.parameters())

    result = steps.train(optimizer, scaler, set_gradients, clip)
    params = list(network.parameters())
    result["empty"] = sum(param.numel() == 0 for param in params)
    result["params"] = joined(params)
    for name in ("exp_avg", "exp_avg_sq"):
        states = [optimizer.state.get(param, {}) for param in params]
        result[name] = joined(state.get(name, torch.zeros(0)) for state in states)
    return result


@pytest.mark.parametrize("case", SHARDED)
def test_fsdp1_steps_clips_and_skips_as_one_process(case):
    use_orig_params, dtype, _ = SHARDED[case]
    results, expected = scenario.results("fully_sharded", case), steps.alone(dtype=dtype)
    for name in ("params", "exp_avg", "exp_avg_sq"):
        expected[name] = [torch.cat([tensor.flatten() for tensor in expected[name]])]
    del expected["step"]
    for result in results:
        steps.assert_like(result, expected, tolerance=1e-5)
    # Rank 1 has all elements of some original parameters.
    assert (results[0]["empty"] > 0) == use_orig_params
