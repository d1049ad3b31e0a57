"""Ranks that cannot write or read a checkpoint, and what cannot be stored in pieces."""

import time
from pathlib import Path

import ampfuse.checkpoint as checkpoint
import torch
import torch.distributed as dist
from ampfuse.checkpoint import CheckpointError, _save, _write
from checkpointed import Stateful, error_of, same, shared_folder
from on_ranks import on_ranks
from processes import Scenarios
from sharded_training import training, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

scenario = Scenarios()


# The rank that fails, and a part of its message.
OF_ONE = {
    "model of rank 1": (1, "weight is torch.float32 of shape [3, 3] in the checkpoint, and"),
    "state of rank 1": (1, "save: values is of <class 'builtin_function_or_method'>"),
    "rank 0 cannot write": (0, "/proc/run: the checkpoint of step 1 could not be written"),
}


@on_ranks(scenario, *OF_ONE)
def test_error_of_one_rank_is_raised_on_all_and_names_the_rank(kind):
    folder, (own, message) = shared_folder(), OF_ONE[kind]
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
    assert message in error, error
    assert (f"rank {own}: " in error) == (dist.get_rank() != own), error
    assert step == 1
    assert torch.equal(model.weight, weights)


FILE = "rank-00001-00000.safetensors"
DAMAGES = {
    "flipped bit": (f"{FILE}: model/", "the tensor has changed since it was written"),
    "missing file": (f"{FILE}: this file is missing",),
}


@on_ranks(scenario, *DAMAGES)
def test_damage_of_a_piece_is_found_by_the_rank_that_needs_it(kind):
    folder = shared_folder()
    first, second = training(0, "float32"), training(1, "float32")
    path = checkpoint.save(folder, step=1, **first.objects).path
    if dist.get_rank() == 0:
        file = path / FILE
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.unlink() if kind == "missing file" else file.write_bytes(content)
    dist.barrier()
    before = whole(second.tensors())
    error = error_of(lambda: checkpoint.load(folder, **second.objects))
    after = whole(second.tensors())
    assert all(part in error for part in DAMAGES[kind]), error
    if kind == "flipped bit":
        assert ("rank 1: " in error) == (dist.get_rank() == 0), error
    assert same(after, before)


def no_space(*_):
    raise OSError(28, "No space left on device")


def no_memory(*_):
    raise MemoryError


def never(*_):
    time.sleep(1.5)


NO_SPACE = "[Errno 28] No space left on device"
NOT_WRITTEN = "the checkpoint of step 2 could not be written"
# Rank 1 does this instead of writing its pieces, or of leaving a note in the background, which says
# what it has written or why it failed. Then the errors of both ranks have these parts.
FAILURES = {
    "at once": ({"write": no_space}, [f"{NOT_WRITTEN}: {NO_SPACE}"] * 2),
    "in the background": ({"write": no_space}, [f"{NOT_WRITTEN}: {NO_SPACE}"] * 2),
    "also its note": (
        {"write": no_space, "note": no_space},
        ["rank 1: failed without a message", NO_SPACE],
    ),
    "only its note": ({"note": no_space}, ["rank 1: failed without a message", NO_SPACE]),
    "out of memory": ({"write": no_memory}, ["rank 1: MemoryError()", "MemoryError()"]),
    "never": ({"write": never}, ["rank 1 has not written its part in", NOT_WRITTEN]),
}


@on_ranks(scenario, *FAILURES)
def test_rank_that_does_not_write_its_pieces_is_named_and_nothing_is_left(kind):
    """Rank 0 does not wait for a rank that cannot even say why it failed."""
    folder, write_text, rank = shared_folder(), Path.write_text, dist.get_rank()
    failure, texts = FAILURES[kind]
    model = training(0, "float32").model
    checkpoint.save(folder, step=1, model=model)
    if rank == 1:
        _save.write_files = failure.get("write", _write.write_files)
        Path.write_text = failure.get("note", write_text)
    else:
        _write.LONGEST_WAIT = 0.5 if kind == "never" else 20.0  # a mistake must not take 1,800
    try:
        checkpoint.save(folder, step=2, model=model, background=kind != "at once").wait()
        error = ""
    except (CheckpointError, MemoryError) as caught:
        error = repr(caught)
    dist.barrier()
    _save.write_files, _write.LONGEST_WAIT = _write.write_files, 1800.0
    Path.write_text = write_text
    names = sorted(path.name for path in folder.iterdir())
    saved_again = checkpoint.save(folder, step=2, model=model).path.name
    assert texts[rank] in error, error
    assert ("rank 1" in error) == (rank == 0), error
    assert names == [".lock", "step-00000001"], names
    assert saved_again == "step-00000002", saved_again


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
    "other shape": "rows of SGD: expected a DTensor of shape [4, 4] like its parameter, got DTen",
    "local state": "rows of SGD: expected a DTensor of shape [4, 4] like its parameter, got Tens",
}


@on_ranks(scenario, *REFUSED)
def test_what_cannot_be_stored_in_pieces_is_refused(kind):
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
    error = error_of(lambda: checkpoint.save(folder, step=1, values=values, **objects))
    assert REFUSED[kind] in error, error
