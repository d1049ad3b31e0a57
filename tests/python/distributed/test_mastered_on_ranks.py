"""ampfuse.Mastered on two ranks: with shards of one model, and with a model for each rank."""

from functools import partial

import ampfuse
import pytest
import torch
import torch.distributed as dist
from on_ranks import played  # noqa: F401
from processes import Scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

pytestmark = pytest.mark.slow

MAKE = partial(torch.optim.RMSprop, lr=0.01, momentum=0.9)
CLIP = 0.5
scenario = Scenarios()


def trained(is_sharded, dtype):
    """Return the masters and norms of a model that trains for four steps, the second skipped."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = ampfuse.Mastered(MAKE, model.parameters(), max_grad_norm=CLIP)
    scaler, norms = ampfuse.GradScaler("cpu", init_scale=1024.0), []
    for step in range(4):
        inputs = torch.linspace(-1, 1, 10).reshape(2, 5).to(dtype) * (step + 1)
        # All elements of the gradients of the first layer are non-finite, on both ranks.
        loss = model(inputs).float().square().sum() * (float("inf") if step == 1 else 1.0)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        norms.append(optimizer.grad_norm.item())
    masters = [
        one.full_tensor() if isinstance(one, DTensor) else one for one in optimizer.master_params()
    ]
    saved = {key: sorted(state) for key, state in optimizer.state_dict()["state"].items()}
    return {"masters": [one.detach() for one in masters], "norms": norms, "saved": saved}


@scenario(torch.float32, torch.bfloat16)
def sharded(dtype):
    return trained(True, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_train_as_a_whole_model(dtype):
    expected = trained(False, dtype)
    for found in scenario.results("sharded", dtype):
        assert found["saved"] == expected["saved"]
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4, nan_ok=True)
        torch.testing.assert_close(found["masters"], expected["masters"], rtol=1e-3, atol=1e-4)


@scenario("own")
def of_each_rank(_):
    param = Parameter(torch.ones(4))
    optimizer = ampfuse.Mastered(MAKE, [param], max_grad_norm=CLIP, process_group=dist.group.WORLD)
    values = []
    for overflows in (False, True):
        param.grad = torch.full((4,), 3.0 + dist.get_rank())
        if overflows and dist.get_rank() == 1:
            param.grad[0] = torch.inf
        optimizer.grad_scale = torch.ones(())
        optimizer.step()
        values.append(param.detach().clone())
    return {"values": values}


def test_ranks_share_the_norm_and_skip_together():
    for rank, found in enumerate(scenario.results("of_each_rank", "own")):
        first, second = found["values"]
        assert torch.equal(first, second)
        expected = Parameter(torch.ones(4))
        expected.grad = torch.full((4,), 3.0 + rank) * (CLIP / 10.0)  # the norm of all is 10
        MAKE([expected]).step()
        torch.testing.assert_close(first, expected.detach())
