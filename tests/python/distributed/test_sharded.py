"""Models on four ranks whose parameters are DTensors train as one process.

They are sharded by fully_shard (FSDP2), tensor parallel, or both. Parameters of some layers are
DTensors on another mesh than those of others, or plain tensors.
"""

import copy

import ampfuse
import distributed_steps as steps
import pytest
import torch
import torch.distributed as dist
from optim_models import assert_same_bits
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import Parameter

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)


def trained(network, clip, rank_of_data, overflows, params):
    """Train a model; in one step a gradient of these parameters overflows in one shard."""
    optimizer = steps.adamw(network.parameters(), clip)
    scaler = ampfuse.GradScaler("cpu", steps.SCALE)

    def set_gradients(step):
        scaler.scale(steps.loss_of(network, rank_of_data, step)).backward()
        if step == steps.OVERFLOWING and overflows:
            steps.overflow(params)

    return steps.train(optimizer, scaler, set_gradients, clip)


KINDS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "float32 on the CPU": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "float32, 2 replicas": {"is_replicated": True},
    "float16, 2 replicas": {"is_replicated": True, "dtype": torch.float16},
}
CASES = [
    (clip, kind)
    for clip in steps.CLIPS
    for kind in KINDS
    if clip == "clipped in the step" or kind in ("bfloat16", "float16, 2 replicas")
]


def sharded(*, dtype=None, is_replicated=False, **options):
    """Return a model of which each layer is sharded by itself."""
    sizes, names = ((2, 2), ("replicas", "shards")) if is_replicated else ((4,), ("shards",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    network = steps.model()
    for module in (network[0], network[2], network):
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    return network


@scenario(*CASES)
def fully_sharded(case):
    clip, kind = case
    network = sharded(**KINDS[kind])
    overflows = network[0].weight.device_mesh.get_local_rank("shards") == 1
    return trained(network, steps.CLIPS[clip], dist.get_rank(), overflows, [*network.parameters()])


@steps.each(CASES)
def test_fully_sharded_model_steps_clips_and_skips_as_one_process(case):
    _, kind = case
    expected = steps.alone(ranks=4, dtype=KINDS[kind].get("dtype"))
    for result in scenario.results("fully_sharded", case):
        steps.assert_like(result, expected, tolerance=1e-5)


@scenario("three rows")
def loaded(_):
    """Load the state of a parameter with three rows, of which rank 3 has none."""
    mesh = init_device_mesh("cpu", (4,))
    params = [Parameter(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)])) for _ in range(2)]
    optimizers = [ampfuse.AdamW([param], lr=0.1) for param in params]

    def step():
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.ones_like(param)
            optimizer.step()

    step()
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    step()
    return {"params": steps.whole(params), "rows": len(params[0].to_local())}


def test_state_of_a_parameter_with_fewer_rows_than_ranks_is_loaded():
    results = scenario.results("loaded", "three rows")
    assert [result["rows"] for result in results] == [1, 1, 1, 0]
    for result in results:
        assert_same_bits(result["params"][:1], result["params"][1:])


SIZES = {"tensor parallel": (1, 4), "fully_shard and tensor parallel": (2, 2)}
PARALLEL = [
    (clip, kind)
    for clip in ("clipped in the step", "clipped by ampfuse", "clipped by the scaler")
    for kind in SIZES
]


def with_norms():
    """Return a model whose first and last layer will not be tensor parallel."""
    return nn.Sequential(nn.LayerNorm(6), *steps.model(), nn.LayerNorm(4))


@scenario(*PARALLEL)
def tensor_parallel(case):
    clip, kind = case
    mesh = init_device_mesh("cpu", SIZES[kind], mesh_dim_names=("data", "tensor"))
    network = with_norms()
    parallelize_module(network, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    if mesh["data"].size() > 1:
        for module in (*network, network):
            if list(module.parameters()):
                fully_shard(module, mesh=mesh["data"])
    params = [network[1].weight]
    overflows = dist.get_rank() == 1
    result = trained(network, steps.CLIPS[clip], mesh.get_local_rank("data"), overflows, params)
    meshes = {
        param.device_mesh if isinstance(param, DTensor) else None for param in network.parameters()
    }
    return result | {"meshes": len(meshes)}


@steps.each(PARALLEL)
def test_model_on_several_meshes_steps_clips_and_skips_as_one_process(case):
    _, kind = case
    expected = steps.alone(with_norms(), ranks=SIZES[kind][0])
    for result in scenario.results("tensor_parallel", case):
        assert result["meshes"] == 2
        steps.assert_like(result, expected, tolerance=1e-5)


ROWS_OF_EMBEDDING = {
    "0": RowwiseParallel(input_layouts=Replicate()),
    "1": ColwiseParallel(),
    "3": RowwiseParallel(),
}


def with_embedding():
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(8, 6), *steps.model())


def trained_on_words(network):
    optimizer, scaler = steps.adamw(network.parameters()), ampfuse.GradScaler("cpu", steps.SCALE)

    def set_gradients(step):
        scaler.scale(network(torch.arange(step, step + 4)).square().mean()).backward()
        if step == steps.OVERFLOWING:
            steps.overflow([network[1].weight])

    return steps.train(optimizer, scaler, set_gradients)


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
        steps.assert_like(result, expected, tolerance=1e-5)
