"""Ranks that cannot write or read a checkpoint, and what cannot be stored in pieces."""

import time

import ampfuse.checkpoint as checkpoint
import pytest
import torch
import torch.distributed as dist
from ampfuse.checkpoint import CheckpointError, _save, _write
from checkpointed import Stateful, error_of, same, shared_folder
from processes import Scenarios
from sharded_training import training, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

scenario = Scenarios()


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("ranks"))


@scenario("model of rank 1", "state of rank 1", "rank 0 cannot write")
def fail(kind):
    folder = shared_folder()
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    checkpoint.save(folder, step=1, model=model)
    weights = model.weight.clone()
    if kind == "rank 0 cannot write":
        error = error_of(lambda: checkpoint.save("/proc/run", step=1, model=model))
    elif kind == "state of rank 1":
        values = print if dist.get_rank() else None
        error = error_of(lambda: checkpoint.save(folder, step=2, model=model, values=values))
    else:
        other = nn.Linear(3, 3 + dist.get_rank())
        error = error_of(lambda: checkpoint.load(folder, model=other))
    step = checkpoint.load(folder, model=model).step
    return {"error": error, "step": step, "same": torch.equal(model.weight, weights)}


@pytest.mark.parametrize(
    ("kind", "own", "message"),
    [
        ("model of rank 1", 1, "weight is torch.float32 of shape [3, 3] in the checkpoint, and"),
        ("state of rank 1", 1, "save: values is of <class 'builtin_function_or_method'>"),
        ("rank 0 cannot write", 0, "/proc/run: cannot write here"),
    ],
)
def test_error_of_one_rank_is_raised_on_all_and_names_the_rank(kind, own, message):
    for rank, result in enumerate(scenario.results("fail", kind)):
        assert message in result["error"]
        assert (f"rank {own}: " in result["error"]) == (rank != own)
        assert result["step"] == 1
        assert result["same"]


@scenario("flipped bit", "missing file")
def damage(kind):
    folder = shared_folder()
    first, second = training(0, "float32"), training(1, "float32")
    path = checkpoint.save(folder, step=1, **first.objects).path
    if dist.get_rank() == 0:
        file = path / "rank-00001-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.unlink() if kind == "missing file" else file.write_bytes(content)
    dist.barrier()
    before = whole(second.tensors())
    error = error_of(lambda: checkpoint.load(folder, **second.objects))
    return {"error": error, "untouched": same(whole(second.tensors()), before)}


def test_flipped_bit_of_a_piece_is_found_by_the_rank_that_needs_it():
    for rank, result in enumerate(scenario.results("damage", "flipped bit")):
        assert ("rank 1: " in result["error"]) == (rank == 0)
        assert "rank-00001-00000.safetensors: model/" in result["error"]
        assert "the tensor has changed since it was written" in result["error"]
        assert result["untouched"]


def test_missing_file_of_pieces_is_named():
    for result in scenario.results("damage", "missing file"):
        assert "rank-00001-00000.safetensors: this file is missing" in result["error"]
        assert result["untouched"]


def no_space(*_):
    raise OSError(28, "No space left on device")


def no_memory(*_):
    raise MemoryError


def never(*_):
    time.sleep(1.5)


# Rank 1 does this instead of writing its pieces, or of leaving a note in the background, which says
# what it has written or why it failed.
FAILURES = {
    "at once": {"write": no_space},
    "in the background": {"write": no_space},
    "also its note": {"write": no_space, "note": no_space},
    "only its note": {"first note": no_space},
    "out of memory": {"write": no_memory},
    "never": {"write": never},
}


@scenario(*FAILURES)
def unwritten(kind):
    folder, leave_note = shared_folder(), _save.leave_note
    model = training(0, "float32").model
    checkpoint.save(folder, step=1, model=model)
    if dist.get_rank() == 1:
        failure = FAILURES[kind]
        _save.write_files = failure.get("write", _write.write_files)
        _save.leave_note = failure.get("first note", leave_note)
        _write.leave_note = failure.get("note", leave_note)
    else:
        _write.LONGEST_WAIT = 0.5 if kind == "never" else 20.0  # a mistake must not take 1,800
    try:
        checkpoint.save(folder, step=2, model=model, background=kind != "at once").wait()
        error = ""
    except (CheckpointError, MemoryError) as caught:
        error = repr(caught)
    dist.barrier()
    _save.write_files, _write.LONGEST_WAIT = _write.write_files, 1800.0
    _save.leave_note = _write.leave_note = leave_note
    names = sorted(path.name for path in folder.iterdir())
    saved_again = checkpoint.save(folder, step=2, model=model).path.name
    return {"error": error, "names": names, "saved again": saved_again}


NO_SPACE = "[Errno 28] No space left on device"
NOT_WRITTEN = "the checkpoint of step 2 could not be written"


@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("at once", (f"{NOT_WRITTEN}: {NO_SPACE}", f"{NOT_WRITTEN}: {NO_SPACE}")),
        ("in the background", (f"{NOT_WRITTEN}: {NO_SPACE}", f"{NOT_WRITTEN}: {NO_SPACE}")),
        ("also its note", ("rank 1: it could not write its part, nor say why", NO_SPACE)),
        ("only its note", (f"rank 1: {NO_SPACE}", NO_SPACE)),
        ("out of memory", ("rank 1: MemoryError()", "MemoryError()")),
        ("never", ("rank 1 has not written its part in", NOT_WRITTEN)),
    ],
)
def test_rank_that_does_not_write_its_pieces_is_named_and_nothing_is_left(kind, texts):
    """Rank 0 does not wait for a rank that cannot even say why it failed."""
    for rank, result in enumerate(scenario.results("unwritten", kind)):
        assert texts[rank] in result["error"]
        assert ("rank 1" in result["error"]) == (rank == 0)
        assert result["names"] == [".lock", "step-00000001"]
        assert result["saved again"] == "step-00000002"


class Weight(nn.Module):
    """A model of one parameter."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


REFUSED = {
    "other model": "ranks [1] have other objects than rank 0, or other tensors in them",
    "sharded on rank 0": "ranks [1] have other objects than rank 0, or other tensors in them",
    "other objects": "ranks [1] have other objects than rank 0, or other tensors in them",
    "stages": "save: model/state/weight differs between ranks",
    "loader": "save: loader: only models and optimizers may have DTensors",
    "values": "save: values: only models and optimizers may have DTensors",
    "nested": "save: nested of SGD: only models and optimizers may have DTensors",
    "partial": "save: model/state/weight: checkpoints of (Partial(sum),)",
    "other shape": "rows of SGD is a DTensor of shape [4], and its parameter is a DTensor of",
    "local state": "rows of SGD is a tensor of shape [2, 4], and its parameter is a DTensor",
}


@scenario(*REFUSED)
def refused(kind):
    folder, mesh, rank = shared_folder(), init_device_mesh("cpu", (2,)), dist.get_rank()
    whole, rows = torch.ones(4, 4), distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    stages = [init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "ranks"))["ranks"]]
    param = nn.Parameter(sharded)
    optimizer = torch.optim.SGD([param], lr=0.1)
    state = {"nested": [rows], "other shape": rows, "local state": torch.ones(2, 4)}
    if kind in state:
        optimizer.state[param]["nested" if kind == "nested" else "rows"] = state[kind]
    objects = {
        "other model": {"model": nn.Linear(3, 3 + rank)},
        "sharded on rank 0": {"model": Weight(whole if rank else sharded)},
        "other objects": {f"model{rank}": Weight(whole)},
        "stages": {"model": Weight(distribute_tensor(whole + rank, stages[0], [Shard(0)]))},
        "loader": {"loader": Stateful({"order": rows})},
        "partial": {"model": Weight(DTensor.from_local(whole, mesh, [Partial()]))},
    }.get(kind, {"optimizer": optimizer})
    values = rows if kind == "values" else None
    return {"error": error_of(lambda: checkpoint.save(folder, step=1, values=values, **objects))}


@pytest.mark.parametrize(("kind", "message"), REFUSED.items())
def test_what_cannot_be_stored_in_pieces_is_refused(kind, message):
    for result in scenario.results("refused", kind):
        assert message in result["error"]
