"""Steps that round at random give the same bits on any number of ranks, and averages of shards."""

import itertools

import ampfuse
import pytest
import torch
from on_ranks import on_ranks
from optim_models import assert_same_bits
from processes import Scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Linear, Parameter, Sequential

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


@on_ranks(scenario)
def test_shards_of_any_dimension_are_rounded_by_numbers_of_their_own():
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.zeros(64, 128, dtype=torch.bfloat16)
    param = Parameter(distribute_tensor(whole, mesh, [Shard(1)]))
    optimizer = ampfuse.SGD([param], lr=1 / 3, master_weights="stochastic")
    param.grad = distribute_tensor(whole + 1, mesh, [Shard(1)])
    optimizer.step()
    shards = [shard.flatten() for shard in param.detach().full_tensor().split(32, dim=1)]
    for one, after in itertools.pairwise(shards):
        assert not torch.equal(one, after)
        # The shard begins 32 elements later in the first row.
        assert not torch.equal(one[32:], after[:-32])


@on_ranks(scenario)
def test_evaluations_of_a_sharded_model_use_averages_inside_of_the_block_only():
    torch.manual_seed(0)
    model = Sequential(Linear(8, 8), Linear(8, 2))
    fully_shard(model[0])
    fully_shard(model)  # keeps its gathered weights after a forward pass without gradients
    optimizer = ampfuse.AdamW(model.parameters(), lr=0.1, ema=0.9)
    inputs = torch.randn(4, 8)
    for _ in range(3):
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def outputs(tensors):
        """Return what the model computes, from whole weights."""
        w0, b0, w1, b1 = (tensor.full_tensor() for tensor in tensors)
        return (inputs @ w0.T + b0) @ w1.T + b1

    own = outputs(param.detach() for param in model.parameters())
    averaged = outputs(optimizer.state[param]["ema_param"] for param in model.parameters())
    assert not torch.allclose(own, averaged)
    with torch.no_grad():
        torch.testing.assert_close(model(inputs), own)
        with optimizer.averaged(model):
            torch.testing.assert_close(model(inputs), averaged)
        torch.testing.assert_close(model(inputs), own)
    with pytest.raises(RuntimeError, match=r"parameters are DTensors, .* write averaged\(model\)"):
        optimizer.averaged().__enter__()


@on_ranks(scenario)
def test_averages_of_some_parameters_only_are_refused():
    params = [Parameter(torch.ones(5)) for _ in range(8)]
    optimizer = ZeroRedundancyOptimizer(params, ampfuse.AdamW, ema=0.9)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(RuntimeError, match="each rank has averages of some parameters only"):
        optimizer.optim.averaged().__enter__()


@on_ranks(scenario, *KINDS)
def test_compiled_steps_of_shards_have_the_bits_of_eager_ones(kind):
    _, options = KINDS[kind]
    mesh = init_device_mesh("cpu", (4,))
    ends = []
    for compiles in (False, True):
        torch.manual_seed(0)
        param = Parameter(distribute_tensor(torch.randn(64, 4).bfloat16(), mesh, [Shard(0)]))
        optimizer = ampfuse.AdamW([param], lr=0.1, **options)
        step = optimizer.step
        if compiles:
            step = torch.compile(step, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            param.grad = distribute_tensor(torch.randn(64, 4).bfloat16(), mesh, [Shard(0)])
            step()
        ends.append(param.detach().full_tensor())
    assert torch.equal(*ends)
