"""Steps that round at random give the same bits on one, two and four ranks."""

import ampfuse
import pytest
import torch
from on_ranks import on_ranks
from optim_models import assert_same_bits
from processes import Scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)

# Shards of the first kind begin anywhere in a group of 32 elements, and one is empty on four ranks.
# 8-bit moments are the same on all ranks if shards do not cut groups.
KINDS = {
    "stochastic": ([(7, 5), (3,), (33, 3)], {"master_weights": "stochastic"}),
    "bfloat16 averages": ([(7, 5), (3,), (33, 3)], {"ema": 0.5, "ema_dtype": torch.bfloat16}),
    "8-bit moments": (
        [(8, 32), (64, 5, 32)],
        {"master_weights": "stochastic", "state_dtype": "8bit"},
    ),
}


def stepped(kind, shard):
    """Return parameters and averages after four steps; `shard` distributes a tensor."""
    shapes, options = KINDS[kind]
    torch.manual_seed(0)
    whole = [torch.randn(shape).bfloat16() for shape in shapes]
    params = [Parameter(shard(param)) for param in whole]
    optimizer = ampfuse.AdamW(params, lr=0.01, seed=5, **options)
    for _ in range(4):
        for param, like in zip(params, whole, strict=True):
            param.grad = shard(torch.randn(like.shape).bfloat16())
        optimizer.step()
    averages = [state["ema_param"] for state in optimizer.state.values() if "ema_param" in state]
    return [*params, *averages]


@on_ranks(scenario, *KINDS)
def test_shards_step_to_the_bits_of_one_process(kind):
    alone = stepped(kind, lambda tensor: tensor)
    found = []
    for sizes in ((4,), (2, 2)):
        mesh = init_device_mesh("cpu", sizes)
        placements = [Replicate()] * (len(sizes) - 1) + [Shard(0)]
        tensors = stepped(kind, lambda tensor: distribute_tensor(tensor, mesh, placements))  # noqa: B023
        found.append([tensor.full_tensor() for tensor in tensors])
    for tensors in found:
        assert_same_bits(tensors, alone)
