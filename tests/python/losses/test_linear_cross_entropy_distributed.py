"""Tests of linear_cross_entropy with weights that FSDP2 or tensor parallelism makes DTensors."""

import ampfuse
import pytest
import torch
import torch.distributed as dist
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional

pytestmark = pytest.mark.slow

FEATURES, CLASSES, ROWS = 6, 41, 10  # 41 classes make unequal shards on two ranks: 21 and 20
scenario = Scenarios()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run the scenarios, and return the function that looks up their results."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


class Model(nn.Module):
    """A layer, followed by the last layer with its loss: a module, or a call of the function."""

    def __init__(self, reduction="mean", calls_the_function=False):
        super().__init__()
        torch.manual_seed(0)
        self.calls_the_function = calls_the_function
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = ampfuse.LinearCrossEntropyLoss(
            FEATURES, CLASSES, bias=True, reduction=reduction, chunk_rows=4
        )

    def forward(self, inputs, target):
        hidden, last = self.body(inputs), self.head.linear
        if not self.calls_the_function:
            return self.head(hidden, target).mean()
        return ampfuse.linear_cross_entropy(hidden, last.weight, target, last.bias, chunk_rows=4)


def batch_of(rank):
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(ROWS, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (ROWS,), generator=generator)


def sharded_model(how):
    mesh = init_device_mesh("cpu", (2,))
    if how == "called by the root":  # whose fully_shard group has the head's weight
        model = Model(calls_the_function=True)
        fully_shard(model.body, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    model = Model("none" if how == "none" else "mean")
    policy = MixedPrecisionPolicy()
    if how == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model.head, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def whole(grads):
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def expected(inputs, target):
    """Return the loss and the gradients of one process."""
    model = Model()
    loss = functional.cross_entropy(model.head.linear(model.body(inputs)), target)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@scenario("mean", "none", "called by the root", "bfloat16")
def sharded(how):
    model = sharded_model(how)
    loss = model(*batch_of(dist.get_rank()))
    loss.backward()
    return {"loss": loss.detach(), "grads": whole(p.grad for p in model.parameters())}


@pytest.mark.parametrize("how", ["mean", "none", "called by the root", "bfloat16"])
def test_fully_shard_gives_the_gradients_of_one_process_on_the_whole_batch(outcomes, how):
    batches = [batch_of(rank) for rank in (0, 1)]
    _, grads = expected(*map(torch.cat, zip(*batches, strict=True)))
    is_narrow = how == "bfloat16"
    for batch, result in zip(batches, outcomes("sharded", how), strict=True):
        close = {"rtol": 1e-2, "atol": 1e-2} if is_narrow else {}
        torch.testing.assert_close(result["loss"], expected(*batch)[0], **close)
        close = {"rtol": 3e-2, "atol": 3e-3} if is_narrow else {}
        torch.testing.assert_close(result["grads"], grads, **close)


@scenario("weight", "bias")
def refused(name):
    linear = sharded_model("mean").head.linear
    hidden, target = batch_of(0)
    tensors = {"weight": torch.zeros(CLASSES, FEATURES), "bias": torch.zeros(CLASSES)}
    tensors[name] = getattr(linear, name)
    try:
        ampfuse.linear_cross_entropy(hidden, target=target, **tensors)
    except TypeError as error:
        return {"error": str(error)}
    return {"error": ""}


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_dtensor_is_refused_without_advice_to_gather_it(outcomes, name):
    # Gradients of full_tensor() are not reduced over data-parallel ranks: training would be wrong.
    for result in outcomes("refused", name):
        assert f"linear_cross_entropy: {name}: expected a plain tensor, got" in result["error"]
        assert f"{name}.to_local() and process_group=" in result["error"]
        assert "full_tensor" not in result["error"]


@scenario("weight and bias")
def tensor_parallel(_):
    model = Model()
    mesh = init_device_mesh("cpu", (2,))
    weight, bias = (
        nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
        for p in model.head.linear.parameters()
    )
    inputs, target = batch_of(0)  # all ranks have the same batch
    loss = ampfuse.linear_cross_entropy(
        model.body(inputs),
        weight.to_local(),
        target,
        bias.to_local(),
        process_group=mesh.get_group(),
        first_class=21 * dist.get_rank(),
        num_classes=CLASSES,
    )
    loss.backward()
    grads = [*(p.grad for p in model.body.parameters()), weight.grad, bias.grad]
    return {"loss": loss.detach(), "grads": whole(grads)}


def test_tensor_parallel_shards_give_the_gradients_of_one_process(outcomes):
    loss, grads = expected(*batch_of(0))
    for result in outcomes("tensor_parallel", "weight and bias"):
        torch.testing.assert_close(result["loss"], loss)
        torch.testing.assert_close(result["grads"], grads)
