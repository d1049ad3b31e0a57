"""torch.distributed.checkpoint: runs go on with other numbers of ranks, or in torch's optimizer.

Two ranks save a run, one loads it and goes on, then four do.
"""

import os
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytestmark = pytest.mark.slow
OPTIONS = {
    "float32": {},
    "bfloat16 moments": {"state_dtype": torch.bfloat16},
    "masters": {"dtype": torch.bfloat16},
    "remainders": {"dtype": torch.bfloat16, "master_weights": "remainder"},
}
STAGES = [Scenarios(ranks) for ranks in (2, 1, 4)]
# The optimizers that save and load in turn.
PAIRS = {
    **{kind: (ampfuse.AdamW,) * 3 for kind in OPTIONS},
    "torch, then ours": (torch.optim.AdamW, ampfuse.AdamW, torch.optim.AdamW),
    "ours, then torch": (ampfuse.AdamW, torch.optim.AdamW, ampfuse.AdamW),
}
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


def go_on(case):
    """Load what the stage before has saved, train, and save."""
    stage = [scenario.ranks for scenario in STAGES].index(dist.get_world_size())
    run, same_as_saved = Run(*case, stage), True
    names = ("step", "exp_avg", "exp_avg_sq", "master_param")
    if stage > 0:
        dcp.load({"run": run}, checkpoint_id=folder(*case, stage - 1))
        before = torch.load(f"{folder(*case, stage - 1)}.pt")
        same_as_saved = same(run.tensors(names), before["tensors"])
        same_as_saved &= run.scaler.state_dict() == before["scaler"]
    run.train()
    dcp.save({"run": run}, checkpoint_id=folder(*case, stage))
    after = {"tensors": run.tensors(names), "scaler": run.scaler.state_dict()}
    if dist.get_rank() == 0:
        torch.save(after, f"{folder(*case, stage)}.pt")
    dist.barrier()
    return {"same as saved": same_as_saved, "steps": run.tensors(["step"])[-1].item()}


for scenario in STAGES:
    scenario(*CASES)(go_on)


@STAGES[1](None)
def load_bfloat16_from_torch(_):
    """Load weights and moments by a planner that accepts a checkpoint without masters."""
    path = folder("bfloat16", False, 0)
    saved = Run("torch, then ours", False, 0)
    saved.model.bfloat16()
    saved.train()
    dcp.save({"run": saved}, checkpoint_id=path)
    loaded = Run("masters", False, 1)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"run": loaded}, checkpoint_id=path, planner=planner)
    params = ("step", "exp_avg", "exp_avg_sq")
    are_same = [
        torch.equal(one.float(), other.float())
        for one, other in zip(loaded.tensors(params), saved.tensors(params), strict=True)
    ]
    weights = saved.tensors([])
    for group in loaded.optimizer.param_groups:
        group["lr"] = 0.0
    with pytest.warns(UserWarning, match="masters were set to the written values"):
        loaded.train()
    masters = whole(loaded.optimizer.master_params())
    return {"same": all(are_same), "masters": same(masters, [one.float() for one in weights])}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHECKPOINTS", str(tmp_path_factory.mktemp("checkpoints")))
        for scenario in STAGES:
            scenario.play(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{', flattened' * case[1]}")
def test_run_goes_on_with_one_rank_and_then_with_four(played, case):
    for stage, scenario in enumerate(STAGES):
        for result in scenario.results("go_on", case):
            assert result["same as saved"]
            assert result["steps"] == 3 * (stage + 1)


@STAGES[1](None)
def set_flattened_bfloat16_state_of_torch(_):
    """Set a state dict directly, without a checkpoint that would miss masters."""
    saved = Run("torch, then ours", True, 0)
    saved.model.bfloat16()
    saved.train()
    loaded = Run("masters", True, 1)
    loaded.load_state_dict(saved.state_dict())
    weights = saved.tensors([])
    return {"same": same(loaded.tensors([]), weights)}


def test_flattened_state_of_torch_without_masters_is_set(played):
    (result,) = STAGES[1].results("set_flattened_bfloat16_state_of_torch", None)
    assert result["same"]


def test_masters_are_made_from_the_weights_of_torchs_bfloat16_checkpoint(played):
    (result,) = STAGES[1].results("load_bfloat16_from_torch", None)
    assert result["same"]
    assert result["masters"]
