"""Tensor parallel models on four ranks, also sharded by fully_shard, train as one process.

Weights of some layers are DTensors on the mesh of tensor parallelism. Those of the others are plain
tensors, or DTensors on the mesh of fully_shard.
"""

import ampfuse
import pytest
import torch
import torch.distributed as dist
from distributed_steps import (
    CLIPS,
    OVERFLOWING,
    SCALE,
    adamw,
    alone,
    assert_like,
    each,
    loss_of,
    model,
    overflow,
    train,
)
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)
SIZES = {"tensor parallel": (1, 4), "fully_shard and tensor parallel": (2, 2)}


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


def with_norms():
    """Return a model whose first and last layer will not be tensor parallel."""
    return nn.Sequential(nn.LayerNorm(6), *model(), nn.LayerNorm(4))


def parallel(mesh):
    network = with_norms()
    parallelize_module(network, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    if mesh["data"].size() > 1:
        for module in (*network, network):
            if list(module.parameters()):
                fully_shard(module, mesh=mesh["data"])
    return network


def trained(kind, clip):
    """Train a tensor parallel model; in one step a gradient overflows in the shard of one rank."""
    mesh = init_device_mesh("cpu", SIZES[kind], mesh_dim_names=("data", "tensor"))
    network = parallel(mesh)
    optimizer, scaler = adamw(network.parameters(), clip), ampfuse.GradScaler("cpu", SCALE)

    def set_gradients(step):
        scaler.scale(loss_of(network, mesh.get_local_rank("data"), step)).backward()
        if step == OVERFLOWING and dist.get_rank() == 1:
            overflow([network[1].weight])

    result = train(optimizer, scaler, set_gradients, clip)
    meshes = {
        param.device_mesh if isinstance(param, DTensor) else None for param in network.parameters()
    }
    return result | {"meshes": len(meshes)}


CASES = [
    (clip, kind)
    for clip in ("clipped in the step", "clipped by ampfuse", "clipped by the scaler")
    for kind in SIZES
]


@scenario(*CASES)
def clipped_by(case):
    clip, kind = case
    return trained(kind, CLIPS[clip])


@each(CASES)
def test_model_on_several_meshes_steps_clips_and_skips_as_one_process(case):
    _, kind = case
    expected = alone(network=with_norms(), ranks=SIZES[kind][0])
    for result in scenario.results("clipped_by", case):
        assert result["meshes"] == 2
        assert_like(result, expected, tolerance=1e-5)


ROWS_OF_EMBEDDING = {
    "0": RowwiseParallel(input_layouts=Replicate()),
    "1": ColwiseParallel(),
    "3": RowwiseParallel(),
}


def with_embedding():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(8, 6), *model())


def trained_on_words(network):
    optimizer, scaler = adamw(network.parameters()), ampfuse.GradScaler("cpu", SCALE)

    def set_gradients(step):
        loss = network(torch.arange(step, step + 4)).square().mean()
        scaler.scale(loss).backward()
        if step == OVERFLOWING:
            overflow([network[1].weight])

    return train(optimizer, scaler, set_gradients)


@scenario("embedding")
def sharded_embedding(_):
    network = with_embedding()
    parallelize_module(network, init_device_mesh("cpu", (4,)), ROWS_OF_EMBEDDING)
    result = trained_on_words(network)
    return result | {"placements": str(network[0].weight.grad.placements)}


def test_whole_gradient_of_an_embedding_that_is_sharded_by_rows_is_sharded_by_the_step():
    expected = trained_on_words(with_embedding())
    for result in scenario.results("sharded_embedding", "embedding"):
        assert result["placements"] == "(Shard(dim=0),)"
        assert_like(result, expected, tolerance=1e-5)
