"""Tests of linear_cross_entropy with weights that FSDP2 or tensor parallelism makes DTensors."""

import ampfuse
import pytest
import torch
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

pytestmark = pytest.mark.slow

FEATURES, CLASSES, ROWS = 6, 41, 10  # 41 classes make unequal shards on two ranks
EVEN_CLASSES = 40  # for tensor parallelism with shards of equal size
scenario = Scenarios()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Run the scenarios, and return the function that looks up their results."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


class Model(nn.Module):
    """A layer, followed by the last layer with its loss."""

    def __init__(self, reduction):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = ampfuse.LinearCrossEntropyLoss(
            FEATURES, CLASSES, bias=True, reduction=reduction, chunk_rows=4
        )

    def forward(self, inputs, target):
        return self.head(self.body(inputs), target).mean()

    def expected(self, inputs, target):
        logits = self.head.linear(self.body(inputs))
        return functional.cross_entropy(logits, target)


class RootCallsTheFunction(Model):
    """The head's weight is in the root's fully_shard group, and the root's forward passes it."""

    def forward(self, inputs, target):
        linear = self.head.linear
        return ampfuse.linear_cross_entropy(
            self.body(inputs), linear.weight, target, linear.bias, chunk_rows=4
        )


def batch_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return (
        torch.randn(ROWS, FEATURES, generator=generator),
        torch.randint(CLASSES, (ROWS,), generator=generator),
    )


def even_batch():
    """Return the same batch on all ranks, as in tensor parallelism."""
    inputs, target = batch_of(0)
    return inputs, target % EVEN_CLASSES


def sharded(reduction, policy=None):
    model = Model(reduction)
    mesh = init_device_mesh("cpu", (2,))
    policy = policy or MixedPrecisionPolicy()
    fully_shard(model.head, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def whole_gradients(model):
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@scenario("mean", "none")
def gathered(reduction):
    model = sharded(reduction)
    loss = model(*batch_of(torch.distributed.get_rank()))
    loss.backward()
    return {"loss": loss.detach(), "gradients": whole_gradients(model)}


@scenario("mean")
def in_bfloat16(reduction):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(reduction, policy)
    loss = model(*batch_of(torch.distributed.get_rank()))
    loss.backward()
    gradients = whole_gradients(model)
    return {"loss": loss.detach().float(), "gradients": gradients}


@scenario("mean")
def called_by_the_root(reduction):
    model = RootCallsTheFunction(reduction)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(*batch_of(torch.distributed.get_rank()))
    loss.backward()
    return {"loss": loss.detach(), "gradients": whole_gradients(model)}


@scenario("weight", "bias")
def refused(name):
    linear = sharded("mean").head.linear
    hidden, target = batch_of(0)
    plain = {"weight": torch.zeros(CLASSES, FEATURES), "bias": torch.zeros(CLASSES)}
    try:
        ampfuse.linear_cross_entropy(hidden, target=target, **plain | {name: getattr(linear, name)})
    except TypeError as error:
        return {"error": str(error)}
    return {"error": ""}


@scenario("weight and bias")
def tensor_parallel(_):
    model = Model("mean")
    mesh = init_device_mesh("cpu", (2,))
    weight, bias = (
        nn.Parameter(distribute_tensor(p.detach()[:EVEN_CLASSES], mesh, [Shard(0)]))
        for p in (model.head.linear.weight, model.head.linear.bias)
    )
    inputs, target = even_batch()
    loss = ampfuse.linear_cross_entropy(
        model.body(inputs),
        weight.to_local(),
        target,
        bias.to_local(),
        process_group=mesh.get_group(),
    )
    loss.backward()
    return {
        "loss": loss.detach(),
        "head": [p.grad.full_tensor() for p in (weight, bias)],
        "body": [p.grad for p in model.body.parameters()],
    }


def expected():
    """Return each rank's loss, and the gradients of one process on the whole batch."""
    model = Model("mean")
    batches = [batch_of(rank) for rank in (0, 1)]
    whole = [torch.cat(parts) for parts in zip(*batches, strict=True)]
    model.expected(*whole).backward()
    losses = [model.expected(*batch) for batch in batches]
    return losses, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "how", [("gathered", "mean"), ("gathered", "none"), ("called_by_the_root", "mean")]
)
def test_fully_shard_gives_the_gradients_of_one_process_on_the_whole_batch(outcomes, how):
    losses, gradients = expected()
    for loss, result in zip(losses, outcomes(*how), strict=True):
        torch.testing.assert_close(result["loss"], loss.detach())
        for name, gradient in gradients.items():
            torch.testing.assert_close(result["gradients"][name], gradient)


def test_fully_shard_in_bfloat16_gives_the_gradients_of_one_process(outcomes):
    losses, gradients = expected()
    for loss, result in zip(losses, outcomes("in_bfloat16", "mean"), strict=True):
        torch.testing.assert_close(result["loss"], loss.detach(), rtol=1e-2, atol=1e-2)
        for name, gradient in gradients.items():
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=3e-2, atol=3e-3)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_dtensor_is_refused_without_advice_to_gather_it(outcomes, name):
    # Gradients of full_tensor() are not reduced over data-parallel ranks: training would be wrong.
    for result in outcomes("refused", name):
        assert f"linear_cross_entropy: {name}: expected a plain tensor, got" in result["error"]
        assert "in the forward of the module whose fully_shard group" in result["error"]
        assert "LinearCrossEntropyLoss" in result["error"]
        assert f"{name}.to_local() and process_group=" in result["error"]
        assert "full_tensor" not in result["error"]


def test_tensor_parallel_shards_give_the_gradients_of_one_process(outcomes):
    model = Model("mean")
    linear = model.head.linear
    inputs, target = even_batch()
    logits = linear(model.body(inputs))[:, :EVEN_CLASSES]
    loss = functional.cross_entropy(logits, target)
    loss.backward()
    head = [p.grad[:EVEN_CLASSES] for p in linear.parameters()]
    body = [p.grad for p in model.body.parameters()]
    for result in outcomes("tensor_parallel", "weight and bias"):
        torch.testing.assert_close(result["loss"], loss.detach())
        torch.testing.assert_close(result["head"], head)
        torch.testing.assert_close(result["body"], body)
