"""Ranks that cannot write or read their pieces, and what cannot be stored in pieces."""

import time

import ampfuse.checkpoint as checkpoint
import pytest
import torch
import torch.distributed as dist
from ampfuse.checkpoint import CheckpointError, _save, _write
from checkpointed import error_of, same, shared_folder
from processes import Scenarios
from sharded_training import training, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

scenario = Scenarios()


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("shards"))


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


@scenario("at once", "in the background")
def full(kind):
    """Let the disk of rank 1 be full while it writes."""
    folder = shared_folder()
    model = training(0, "float32").model
    checkpoint.save(folder, step=1, model=model)
    if dist.get_rank() == 1:
        _save.write_files = no_space
    background = kind == "in the background"
    error = error_of(
        lambda: checkpoint.save(folder, step=2, model=model, background=background).wait()
    )
    dist.barrier()
    _save.write_files = _write.write_files
    names = sorted(path.name for path in folder.iterdir())
    saved_again = checkpoint.save(folder, step=2, model=model).path.name
    return {"error": error, "names": names, "saved again": saved_again}


@pytest.mark.parametrize("kind", ["at once", "in the background"])
def test_rank_that_cannot_write_is_named_and_nothing_is_left(kind):
    for rank, result in enumerate(scenario.results("full", kind)):
        assert ("rank 1: " in result["error"]) == (rank == 0)
        assert "the checkpoint of step 2 could not be written" in result["error"]
        assert "No space left on device" in result["error"]
        assert result["names"] == [".lock", "step-00000001"]
        assert result["saved again"] == "step-00000002"


REFUSED = ("other model", "sharded on rank 0", "other objects", "stages", "loader", "values")
REFUSED = (*REFUSED, "nested", "partial", "other shape", "local state")


class Weight(nn.Module):
    """A model of one parameter."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


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
        "loader": {"loader": Position({"order": rows})},
        "partial": {"model": Weight(DTensor.from_local(whole, mesh, [Partial()]))},
    }.get(kind, {"optimizer": optimizer})
    values = rows if kind == "values" else None
    return {"error": error_of(lambda: checkpoint.save(folder, step=1, values=values, **objects))}


class Position:
    """A loader with this state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other model", "ranks [1] have other objects than rank 0, or other tensors in them"),
        ("sharded on rank 0", "ranks [1] have other objects than rank 0, or other tensors in them"),
        ("other objects", "ranks [1] have other objects than rank 0, or other tensors in them"),
        ("stages", "save: model/state/weight differs between ranks"),
        ("loader", "save: loader: only models and optimizers may have DTensors"),
        ("values", "save: values: only models and optimizers may have DTensors"),
        ("nested", "save: nested of SGD: only models and optimizers may have DTensors"),
        ("partial", "save: model/state/weight: checkpoints of (Partial(sum),)"),
        ("other shape", "rows of SGD is a DTensor of shape [4], and its parameter is a DTensor of"),
        ("local state", "rows of SGD is a tensor of shape [2, 4], and its parameter is a DTensor"),
    ],
)
def test_what_cannot_be_stored_in_pieces_is_refused(kind, message):
    for result in scenario.results("refused", kind):
        assert message in result["error"]


@scenario("also its note", "only its note", "out of memory")
def unwritten(kind):
    """Let rank 1 fail in the background in ways that leave no note, or no text."""
    folder = shared_folder()
    model = training(0, "float32").model

    def fail(*_):
        raise MemoryError if kind == "out of memory" else OSError(28, "No space left on device")

    leave_note = _save.leave_note
    if dist.get_rank() == 1:
        if kind == "only its note":
            _save.leave_note = fail
        else:
            _save.write_files = fail
        if kind == "also its note":
            _write.leave_note = fail
    saving = checkpoint.save(folder, step=2, model=model, background=True)
    try:
        saving.wait()
        error = ""
    except (CheckpointError, MemoryError) as caught:
        error = repr(caught)
    dist.barrier()
    _save.write_files = _write.write_files
    _save.leave_note = _write.leave_note = leave_note
    saved = checkpoint.save(folder, step=2, model=model).path.name
    return {"error": error, "saved": saved}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("also its note", ("rank 1: it could not write its part, nor say why", "No space left")),
        ("only its note", ("rank 1: [Errno 28] No space left on device", "No space left")),
        ("out of memory", ("rank 1: MemoryError()", "MemoryError()")),
    ],
)
def test_rank_0_does_not_wait_for_a_rank_that_cannot_say_why_it_failed(kind, texts):
    for result, text in zip(scenario.results("unwritten", kind), texts, strict=True):
        assert text in result["error"]
        assert result["saved"] == "step-00000002"


@scenario("waits")
def slow(_):
    """Let rank 1 take longer in the background than rank 0 waits for it."""
    folder = shared_folder()
    model = training(0, "float32").model
    if dist.get_rank() == 1:
        _save.write_files = lambda *_: time.sleep(1.5)
    else:
        _write.LONGEST_WAIT = 0.5
    saving = checkpoint.save(folder, step=2, model=model, background=True)
    error = error_of(saving.wait)
    dist.barrier()
    _save.write_files, _write.LONGEST_WAIT = _write.write_files, 1800.0
    return {"error": error, "names": sorted(path.name for path in folder.iterdir())}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_rank_that_never_writes_its_pieces_is_named():
    first, second = scenario.results("slow", "waits")
    assert "rank 1 has not written its part in" in first["error"]
    assert "the checkpoint of step 2 could not be written" in second["error"]
    assert first["names"] == [".lock"]
