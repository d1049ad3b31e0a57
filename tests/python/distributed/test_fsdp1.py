"""FullyShardedDataParallel (FSDP1) on two ranks trains as one process.

Its shards are plain tensors, so scaler and optimizer get the group of all ranks.
"""

import ampfuse
import pytest
import torch
import torch.distributed as dist
from distributed_steps import (
    CLIP,
    OVERFLOWING,
    SCALE,
    adamw,
    alone,
    assert_like,
    loss_of,
    model,
    overflow,
    train,
)
from processes import Scenarios
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

pytestmark = pytest.mark.slow
scenario = Scenarios()


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


def sharded(use_orig_params, dtype=None):
    """Return a model of which each layer is sharded by itself."""
    options = {"use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    if dtype is not None:
        options["mixed_precision"] = MixedPrecision(dtype, reduce_dtype=torch.float32)
    network = model()
    for index in (0, 2):
        network[index] = FullyShardedDataParallel(network[index], **options)
    return FullyShardedDataParallel(network, **options)


def trained(network, clip=None):
    """Train a sharded model; in one step a gradient overflows in the shard of rank 1."""
    group = dist.group.WORLD
    optimizer = adamw(network.parameters(), clip, process_group=group)
    scaler = ampfuse.GradScaler("cpu", SCALE, process_group=group)

    def set_gradients(step):
        scaler.scale(loss_of(network, dist.get_rank(), step)).backward()
        if step == OVERFLOWING and dist.get_rank() == 1:
            overflow(network.parameters())

    result = train(optimizer, scaler, set_gradients, clip)
    params = list(network.parameters())
    result["empty"] = sum(param.numel() == 0 for param in params)
    result["params"] = joined(params)
    for name in ("exp_avg", "exp_avg_sq"):
        states = [optimizer.state.get(param, {}) for param in params]
        result[name] = joined(state.get(name, torch.zeros(0)) for state in states)
    return result


def joined(tensors):
    """Return the shards of all ranks as one vector. Each rank has a shard of each parameter."""
    of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, [tensor.detach().flatten() for tensor in tensors])
    return [torch.cat([shard for shards in zip(*of_ranks, strict=True) for shard in shards])]


def assert_like_one_process(results, expected):
    for name in ("params", "exp_avg", "exp_avg_sq"):
        expected[name] = [torch.cat([tensor.flatten() for tensor in expected[name]])]
    del expected["step"]
    for result in results:
        assert_like(result, expected, tolerance=1e-5)


CASES = {
    "flat": (False, None),
    "flat, bfloat16": (False, torch.bfloat16),
    "original": (True, None),
    "original, bfloat16": (True, torch.bfloat16),
}


@scenario(*CASES)
def clipped_by_the_step(case):
    return trained(sharded(*CASES[case]))


@pytest.mark.parametrize("case", CASES)
def test_fsdp1_with_flat_or_original_parameters_steps_clips_and_skips_as_one_process(case):
    use_orig_params, dtype = CASES[case]
    results = scenario.results("clipped_by_the_step", case)
    assert_like_one_process(results, alone(dtype=dtype))
    # Rank 1 has all elements of some original parameters.
    assert (results[0]["empty"] > 0) == use_orig_params


@scenario("flat", "original")
def clipped_by_fsdp(case):
    network = sharded(*CASES[case])

    def clip(params, scaler, optimizer):
        scaler.unscale_(optimizer)
        return network.clip_grad_norm_(CLIP)

    return trained(network, clip)


@pytest.mark.parametrize("case", ["flat", "original"])
def test_fsdp1_that_clips_unscaled_gradients_itself_steps_as_one_process(case):
    assert_like_one_process(scenario.results("clipped_by_fsdp", case), alone())
