"""linear_cross_entropy over two processes: a layer that FSDP2 shards and gathers."""

import ampfuse
import pytest
import torch
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

pytestmark = pytest.mark.slow

FEATURES, CLASSES, ROWS = 6, 41, 10  # of which two processes get shards of different sizes
scenario = Scenarios()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What each process made of a scenario."""
    scenario.play(tmp_path_factory.mktemp("processes"))
    return scenario.results


class Model(nn.Module):
    """A layer, and the last layer with its loss."""

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


def batch_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return (
        torch.randn(ROWS, FEATURES, generator=generator),
        torch.randint(CLASSES, (ROWS,), generator=generator),
    )


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


@scenario("weight")
def not_gathered(_):
    model = sharded("mean")
    hidden, target = batch_of(0)
    try:
        ampfuse.linear_cross_entropy(hidden, model.head.linear.weight, target)
    except TypeError as error:
        return {"error": str(error)}
    return {"error": ""}


def expected():
    """Of both processes' batches, as averaged."""
    model = Model("mean")
    losses = [model.expected(*batch_of(rank)) for rank in (0, 1)]
    (sum(losses) / 2).backward()
    return losses, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_layer_that_is_gathered_for_its_loss(outcomes, reduction):
    losses, gradients = expected()
    for loss, result in zip(losses, outcomes("gathered", reduction), strict=True):
        torch.testing.assert_close(result["loss"], loss.detach())
        for name, gradient in gradients.items():
            torch.testing.assert_close(result["gradients"][name], gradient)


def test_gathered_in_bfloat16(outcomes):
    losses, gradients = expected()
    for loss, result in zip(losses, outcomes("in_bfloat16", "mean"), strict=True):
        torch.testing.assert_close(result["loss"], loss.detach(), rtol=1e-2, atol=1e-2)
        for name, gradient in gradients.items():
            torch.testing.assert_close(result["gradients"][name], gradient, rtol=3e-2, atol=3e-3)


def test_a_shard_alone_is_refused_with_a_remedy(outcomes):
    for result in outcomes("not_gathered", "weight"):
        assert "weight: expected a plain tensor, got a DTensor" in result["error"]
        assert "weight.full_tensor()" in result["error"]
