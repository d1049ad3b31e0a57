"""A model sharded by fully_shard (FSDP2) over four ranks trains as one process."""

import copy

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
    whole,
)
from optim_models import assert_same_bits
from processes import Scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import Parameter

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


def sharded(*, dtype=None, is_replicated=False, **options):
    """Return a model of which each layer is sharded by itself."""
    sizes, names = ((2, 2), ("replicas", "shards")) if is_replicated else ((4,), ("shards",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    network = model()
    for module in (network[0], network[2], network):
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    return network


def trained(network, clip):
    """Train a sharded model; in one step a gradient overflows in one shard."""
    optimizer, scaler = adamw(network.parameters(), clip), ampfuse.GradScaler("cpu", SCALE)
    mesh = network[0].weight.device_mesh

    def set_gradients(step):
        scaler.scale(loss_of(network, dist.get_rank(), step)).backward()
        if step == OVERFLOWING and mesh.get_local_rank("shards") == 1:
            overflow(network.parameters())

    return train(optimizer, scaler, set_gradients, clip)


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
    for clip in CLIPS
    for kind in KINDS
    if clip == "clipped in the step" or kind in ("bfloat16", "float16, 2 replicas")
]


@scenario(*CASES)
def clipped_by(case):
    clip, kind = case
    return trained(sharded(**KINDS[kind]), CLIPS[clip])


@each(CASES)
def test_fully_sharded_model_steps_clips_and_skips_as_one_process(case):
    _, kind = case
    expected = alone(ranks=4, dtype=KINDS[kind].get("dtype"))
    for result in scenario.results("clipped_by", case):
        assert_like(result, expected, tolerance=1e-5)


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
    return {"params": whole(params), "rows": len(params[0].to_local())}


def test_state_of_a_parameter_with_fewer_rows_than_ranks_is_loaded():
    results = scenario.results("loaded", "three rows")
    assert [result["rows"] for result in results] == [1, 1, 1, 0]
    for result in results:
        assert_same_bits(result["params"][:1], result["params"][1:])
