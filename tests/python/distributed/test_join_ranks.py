"""`join_ranks` gives optimizer and scaler the process group that a parallelised model needs."""

from types import SimpleNamespace

import ampfuse
import pytest
import torch
import torch.distributed as dist
from ampfuse.distributed import join_ranks
from on_ranks import on_ranks
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel

scenario = Scenarios()


def fsdp1(**options):
    return FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), **options)


def fsdp2():
    return fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))


def group():
    return dist.new_group([0, 1])


MODELS = {
    "plain": lambda: nn.Linear(4, 4),
    "DDP": lambda: DistributedDataParallel(nn.Linear(4, 4)),
    "FSDP2": fsdp2,
    "FSDP1": lambda: fsdp1(process_group=group()),
    "FSDP1 without shards": lambda: fsdp1(sharding_strategy=ShardingStrategy.NO_SHARD),
}


@on_ranks(scenario, *MODELS)
def test_only_plain_shards_need_a_group(kind):
    network = MODELS[kind]()
    optimizer = ampfuse.AdamW(network.parameters(), max_grad_norm=1.0)
    scaler = ampfuse.GradScaler("cpu")
    joined = join_ranks(network, optimizer, scaler)
    expected = network.process_group if kind == "FSDP1" else None
    for one in (joined, optimizer, scaler):
        assert one.process_group is expected
    assert ("no group is needed" in joined.reason) == (kind != "FSDP1")


@on_ranks(scenario)
def test_stages_of_a_pipeline_skip_together():
    rank, stages = dist.get_rank(), group()
    network = nn.Linear(4, 4)
    stage = PipelineStage(network, rank, 2, torch.device("cpu"), group=stages)
    optimizer, scaler = ampfuse.AdamW(network.parameters()), ampfuse.GradScaler("cpu")
    join_ranks(network, optimizer, scaler, pipeline=stage)
    # The second stage overflows. The first has no loss to scale.
    for param in network.parameters():
        param.grad = torch.full_like(param, float("inf") if rank else 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.process_group is scaler.process_group is stages
    assert scaler.get_scale() == 2.0**15
    assert scaler.was_skipped()
    alone = [dist.new_group([one]) for one in (0, 1)][rank]
    with pytest.raises(ValueError, match="expected one process group, got 2"):
        join_ranks(fsdp1(), optimizer, pipeline=SimpleNamespace(group=alone))
    with pytest.raises(TypeError, match=r"scaler: expected ampfuse\.GradScaler, got <class 'torch"):
        join_ranks(network, optimizer, torch.amp.GradScaler("cpu"), pipeline=stage)
    of_outliers = ampfuse.GradScaler("cpu", skip_outliers=6.0)
    with pytest.raises(ValueError, match="skip_outliers"):
        join_ranks(network, optimizer, of_outliers, pipeline=stage)
    whole = nn.Sequential(fsdp1(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"1\.weight is whole on each rank"):
        join_ranks(whole, ampfuse.AdamW(whole.parameters()))
    with pytest.raises(TypeError, match=r"SGD, got torch\.optim\.sgd\.SGD"):
        join_ranks(network, torch.optim.SGD(network.parameters()), pipeline=stage)
    before = ampfuse.AdamW(network.parameters(), unscale="before")
    with pytest.raises(ValueError, match='unscale: expected "auto"'):
        join_ranks(network, before, pipeline=stage)


@on_ranks(scenario)
def test_optimizer_within_a_zero_redundancy_optimizer_is_joined():
    network = nn.Linear(4, 4)
    optimizer = ZeroRedundancyOptimizer(network.parameters(), ampfuse.AdamW, lr=0.1)
    scaler = ampfuse.GradScaler("cpu")
    join_ranks(network, optimizer, scaler)
    assert optimizer.optim.process_group is scaler.process_group is optimizer.process_group
