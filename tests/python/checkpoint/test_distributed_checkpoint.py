"""torch.distributed.checkpoint: runs go on with other numbers of ranks, or in torch's optimizer.

Two ranks save a run, one loads it and goes on, then four do.
"""

import os
from functools import partial
from pathlib import Path

import ampfuse
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpointed import same
from processes import Scenarios
from sharded_training import whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.slow
OPTIONS = {
    "float32": {},
    "bfloat16 moments": {"state_dtype": torch.bfloat16},
    "masters": {"dtype": torch.bfloat16},
    "remainders": {"dtype": torch.bfloat16, "master_weights": "remainder"},
    "8-bit moments": {
        "dtype": torch.bfloat16,
        "master_weights": "stochastic",
        "state_dtype": "8bit",
        "ema": 0.9,
    },
    "SGD": {"dtype": torch.bfloat16, "momentum": 0.9},
    "Mastered": {"dtype": torch.bfloat16},
}


def mastered(params, lr):
    """Return torch's AdamW with masters; its counters show the number of steps."""
    return ampfuse.Mastered(partial(torch.optim.AdamW, lr=lr), params)


STAGES = [Scenarios(ranks) for ranks in (2, 1, 4)]
# The optimizers that save and load in turn.
PAIRS = {
    **{kind: (ampfuse.AdamW,) * 3 for kind in OPTIONS},
    "SGD": (ampfuse.SGD,) * 3,
    "Mastered": (mastered,) * 3,
    "torch, then ours": (torch.optim.AdamW, ampfuse.AdamW, torch.optim.AdamW),
    "ours, then torch": (ampfuse.AdamW, torch.optim.AdamW, ampfuse.AdamW),
}
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
CASES = [(kind, flatten) for kind in PAIRS for flatten in (False, True)]


class Run:
    """A sharded model with its optimizer and scaler, as a state that DCP loads in place."""

    def __init__(self, kind, flatten, stage):
        options = OPTIONS.get(kind, {}).copy()
        torch.manual_seed(stage)
        dtype = options.pop("dtype", torch.float32)
        self.model = nn.Sequential(nn.Linear(8, 15), nn.ReLU(), nn.Linear(15, 4)).to(dtype)
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = PAIRS[kind][stage](self.model.parameters(), lr=0.05, **options)
        self.scaler = ampfuse.GradScaler("cpu", init_scale=2.0**stage, growth_interval=2)
        self.options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )
        self.scaler.load_state_dict(state["scaler"])

    def train(self):
        dtype = self.model[0].weight.dtype
        for step in range(3):
            inputs = torch.linspace(-1, 1, 32).reshape(4, 8).to(dtype) * (step + 1)
            self.scaler.scale(self.model(inputs).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def tensors(self, names):
        params = [param.detach() for param in self.model.parameters()]
        states = [self.optimizer.state_dict()["state"][i] for i in range(len(params))]
        found = [state[name] for name in names for state in states if name in state]
        return whole(params + found)


def folder(kind, flatten, stage):
    return Path(os.environ["CHECKPOINTS"], f"{kind} {flatten} {stage}")


def are_within_a_code(moments, others):
    """Compare moments; shards of other sizes cut other groups of 8-bit moments."""
    return all(
        ((one.abs().sqrt() - other.abs().sqrt()).abs() <= 1.01 / 127 * one.abs().sqrt().max()).all()
        for one, other in zip(moments, others, strict=True)
    )


def go_on(case):
    """Load what the stage before has saved, train, and save."""
    stage = [ranks.ranks for ranks in STAGES].index(dist.get_world_size())
    run, same_as_saved = Run(*case, stage), True
    names = ("step", *MOMENTS, "master_param", "ema_param")
    if case[0] == "8-bit moments":
        names = ("step", "ema_param")
    if stage > 0:
        dcp.load({"run": run}, checkpoint_id=folder(*case, stage - 1))
        before = torch.load(f"{folder(*case, stage - 1)}.pt")
        same_as_saved = same(run.tensors(names), before["tensors"])
        same_as_saved &= are_within_a_code(run.tensors(MOMENTS), before["moments"])
        same_as_saved &= run.scaler.state_dict() == before["scaler"]
    run.train()
    dcp.save({"run": run}, checkpoint_id=folder(*case, stage))
    after = {
        "tensors": run.tensors(names),
        "moments": run.tensors(MOMENTS),
        "scaler": run.scaler.state_dict(),
    }
    if dist.get_rank() == 0:
        torch.save(after, f"{folder(*case, stage)}.pt")
    dist.barrier()
    return {"same as saved": same_as_saved, "steps": run.tensors(["step"])[-1].item()}


for ranks in STAGES:
    ranks(*CASES)(go_on)


@STAGES[1]("a checkpoint", "a state")
def load_bfloat16_of_torch(source):
    """Load what has no masters: by a planner that accepts this, or flattened, without a file."""
    saved = Run("torch, then ours", source == "a state", 0)
    saved.model.bfloat16()
    saved.train()
    weights = saved.tensors([])
    loaded = Run("masters", source == "a state", 1)
    if source == "a state":
        loaded.load_state_dict(saved.state_dict())
        return {"same": same(loaded.tensors([]), weights)}
    path = folder("bfloat16", False, 0)
    dcp.save({"run": saved}, checkpoint_id=path)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"run": loaded}, checkpoint_id=path, planner=planner)
    pairs = zip(*(run.tensors(["step", *MOMENTS]) for run in (loaded, saved)), strict=True)
    are_same = all(torch.equal(one.float(), other.float()) for one, other in pairs)
    for group in loaded.optimizer.param_groups:
        group["lr"] = 0.0
    with pytest.warns(UserWarning, match="masters were set to the written values"):
        loaded.train()
    masters = whole(loaded.optimizer.master_params())
    return {"same": are_same and same(masters, [one.float() for one in weights])}


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINTS", str(tmp_path_factory.mktemp("checkpoints")))
        for ranks in STAGES:
            ranks.play(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{', flattened' * case[1]}")
def test_run_goes_on_with_one_rank_and_then_with_four(stages, case):
    for stage, ranks in enumerate(STAGES):
        for result in ranks.results("go_on", case):
            assert result["same as saved"]
            assert result["steps"] == 3 * (stage + 1)


@pytest.mark.parametrize("source", ["a checkpoint", "a state"])
def test_bfloat16_weights_of_torch_without_masters_are_loaded(stages, source):
    (result,) = STAGES[1].results("load_bfloat16_of_torch", source)
    assert result["same"]
