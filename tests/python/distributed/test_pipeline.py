"""A pipeline of two stages (1F1B), each whole or sharded over two ranks, trains as one process.

Only the last stage has a loss to scale. Scaler and optimizer of each stage get the group of both.
"""

import ampfuse
import pytest
import torch.distributed as dist
from distributed_steps import (
    OVERFLOWING,
    SCALE,
    adamw,
    alone,
    assert_like,
    batch,
    each,
    model,
    overflow,
    train,
)
from processes import Scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)
MICRO_BATCHES = 3
# Two copies of a pipeline of two stages. The copies of a stage are replicas, or shards of one.
KINDS, STAGES = ("replicas", "shards"), ("first stage", "last stage")
CASES = [(kind, overflowing) for kind in KINDS for overflowing in STAGES]


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


def stages_and_copies():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))


@scenario(*CASES)
def overflow_in_stage(case):
    """Train; in one step a gradient overflows in one stage, and those of the other are finite."""
    kind, overflowing = case
    mesh = stages_and_copies()
    stage_index, copy_index = mesh.get_local_rank("stages"), mesh.get_local_rank("copies")
    group = mesh["stages"].get_group()
    network = model()
    part = network[:2] if stage_index == 0 else network[2:]
    if kind == "shards":
        fully_shard(part, mesh=mesh["copies"])
    optimizer = adamw(part.parameters(), process_group=group)
    scaler = ampfuse.GradScaler("cpu", SCALE, process_group=group)

    def scaled_loss(outputs, targets):
        return scaler.scale((outputs - targets).square().mean())

    stage = PipelineStage(part, stage_index, 2, "cpu", group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=scaled_loss)

    is_overflowing = stage_index == STAGES.index(overflowing)
    if kind == "shards":
        is_overflowing = is_overflowing and copy_index == 1

    def set_gradients(step):
        inputs, targets = batch(copy_index if kind == "shards" else 0, step)
        schedule.step(inputs) if stage_index == 0 else schedule.step(target=targets)
        if step == OVERFLOWING and is_overflowing:
            overflow(part.parameters())

    return train(optimizer, scaler, set_gradients)


@each(CASES)
def test_stages_of_a_pipeline_step_clip_and_skip_as_one_process(case):
    kind, _ = case
    results = scenario.results("overflow_in_stage", case)
    for first, last in (results[0::2], results[1::2]):
        expected = alone(ranks=2 if kind == "shards" else 1)
        for name in expected.keys() - {"norms", "scales", "skipped"}:
            first[name] += last[name]
        assert_like(first, expected, tolerance=1e-5)
        for name in ("norms", "scales", "skipped"):
            assert last[name] == first[name]


@scenario("all ranks", "stages")
def group_of_shards(kind):
    mesh = stages_and_copies()
    network = model()
    fully_shard(network, mesh=mesh["copies"])
    group = dist.group.WORLD if kind == "all ranks" else mesh["stages"].get_group()
    try:
        adamw(network.parameters(), process_group=group)
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


@pytest.mark.parametrize(("kind", "is_refused"), [("all ranks", True), ("stages", False)])
def test_process_group_of_ranks_that_share_dtensors_is_refused(kind, is_refused):
    # Norms of DTensors cover all shards, so such a group would count them once for each rank.
    for result in scenario.results("group_of_shards", kind):
        expected = "process_group: expected ranks that step other parameters, got ranks that hold"
        assert (expected in result["error"]) == is_refused
