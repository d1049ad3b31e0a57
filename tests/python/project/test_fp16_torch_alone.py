"""Training in float16 with the scaler, AdamW and clipping of torch, as docs/fp16.md reports it.

If a test fails with a newer torch, torch may have learned it: update the table on that page.
"""

import pytest
import torch
import torch.distributed as dist
from fp16_fsdp import PLAN
from on_ranks import played  # noqa: F401
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional
from transformer import VOCABULARY, WIDTH, Transformer, batch

pytestmark = pytest.mark.slow

scenario = Scenarios(ranks=4)


class LanguageModel(nn.Module):
    """The model of fp16_fsdp.py with torch's loss."""

    def __init__(self):
        super().__init__()
        self.transformer = Transformer(blocks=2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, words, targets):
        logits = self.head(self.transformer(words)).flatten(0, 1).float()
        return functional.cross_entropy(logits, targets.flatten())


def sharded(dtype):
    """Return a model with parameters of this dtype that computes in float16, on a 2 x 2 mesh."""
    torch.manual_seed(0)
    model = LanguageModel().to(dtype)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = PLAN | {"head": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tensor"], plan)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for module in (*model.transformer.blocks.values(), model):
        fully_shard(module, mesh=mesh["data"], mp_policy=policy)
    return model


def train(model, optimizer, steps, max_norm=None, infinite=()):
    """Train with torch's scaler; return what happened, or the error of a step."""
    scaler = torch.amp.GradScaler("cpu")
    losses, scales = [], []
    for step in range(steps):
        words, targets = (part.chunk(2)[dist.get_rank() // 2] for part in batch(step))
        optimizer.zero_grad()
        loss = model(words, targets)
        scaler.scale(loss).backward()
        if step in infinite and dist.get_rank() == 3:
            model.head.weight.grad.to_local()[0, 0] = float("inf")
        try:
            if max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
        except (RuntimeError, ValueError) as error:
            return {"error": str(error)}
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return {"losses": losses, "scales": scales}


@scenario(None)
def fsdp_clipped(_):
    model = sharded(torch.float32)
    return train(model, torch.optim.AdamW(model.parameters()), steps=1, max_norm=0.5)


@scenario(False, True)
def fsdp_not_clipped(fused):
    model = sharded(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    return train(model, optimizer, steps=3, infinite=(1,))


@scenario(False, True)
def fsdp_with_float16_parameters(fused):
    model = sharded(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)
    weights = [param.to_local() for param in model.parameters()]
    outcome = train(model, optimizer, steps=30)
    largest = torch.stack([weight.abs().max() for weight in weights]).max()
    return outcome | {"largest_weight": largest.item()}


class Stage(nn.Linear):
    """A linear layer with float32 parameters that computes in float16, and sends float16."""

    def forward(self, inputs):
        with torch.autocast("cpu", torch.float16):
            return super().forward(inputs)


@scenario("scale not created", "scale created")
def pipeline(case):
    rank, is_last = dist.get_rank(), dist.get_rank() == 3
    stage = Stage(4, 4)
    optimizer = torch.optim.AdamW(stage.parameters())
    scaler = torch.amp.GradScaler("cpu")
    if case == "scale created":
        scaler.scale(torch.zeros(()))

    def scaled_loss(outputs, target):
        return scaler.scale((outputs.float() - target).square().mean())

    schedule = Schedule1F1B(PipelineStage(stage, rank, 4, torch.device("cpu")), 4, scaled_loss)
    inputs, target = torch.ones(8, 4, dtype=torch.float16), torch.zeros(8, 4)
    schedule.step(*([inputs] if rank == 0 else []), target=target if is_last else None)
    if rank == 0:
        stage.weight.grad[0, 0] = float("inf")
    before = stage.weight.detach().clone()
    try:
        scaler.step(optimizer)
    except AssertionError as error:
        return {"error": str(error)}
    scaler.update()
    moved = not torch.equal(before, stage.weight.detach())
    return {"error": "", "scale": scaler.get_scale(), "moved": moved}


def test_torch_cannot_clip_parameters_of_two_meshes():
    for result in scenario.results("fsdp_clipped", None):
        assert "must have the same mesh" in result["error"]


@pytest.mark.parametrize("fused", [False, True])
def test_torch_skips_on_all_ranks_if_parameters_are_dtensors(fused):
    for result in scenario.results("fsdp_not_clipped", fused):
        assert result["scales"] == [2.0**16, 2.0**15, 2.0**15]


def test_torch_does_not_train_float16_parameters():
    for result in scenario.results("fsdp_with_float16_parameters", False):
        assert result["error"] == "Attempting to unscale FP16 gradients."
    # Second moments become 0 in float16, so that weights, which begin below 5, make steps of
    # hundreds. The loss begins at 4.2, and is then NaN or between 4 and 18, depending on the CPU.
    results = scenario.results("fsdp_with_float16_parameters", True)
    assert not all(result["largest_weight"] < 20 for result in results)
    for result in results:
        assert not min(result["losses"][-5:]) < 4


def test_scaler_of_torch_acts_for_its_own_stage_of_a_pipeline():
    *others, last = scenario.results("pipeline", "scale not created")
    assert all("Attempted step but _scale is None" in result["error"] for result in others)
    assert last["error"] == ""

    results = scenario.results("pipeline", "scale created")  # and the first stage overflows
    assert [result["moved"] for result in results] == [False, True, True, True]
    assert [result["scale"] for result in results] == [2.0**15] + [2.0**16] * 3
