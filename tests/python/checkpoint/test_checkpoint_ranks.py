"""Two ranks save models whole or in pieces, and any number of processes load them."""

from collections import defaultdict
from pathlib import Path

import ampfuse.checkpoint as checkpoint
import pytest
import torch
import torch.distributed as dist
from ampfuse.checkpoint import CheckpointError
from checkpointed import Stateful, Training, same, same_within_a_code, shared_folder
from on_ranks import on_ranks
from processes import Scenarios
from sharded_training import DATA_PARALLEL, SHARDED, grads_of, training, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

scenario = Scenarios()
KINDS = (*SHARDED, *DATA_PARALLEL)


@scenario(*KINDS)
def resume(kind):
    folder, rank = shared_folder(), dist.get_rank()
    first, loader = training(0, kind), Stateful({"rank": rank, "order": torch.arange(3) + rank})
    first.run(3)
    first.backward()
    background = "background" in kind
    saving = checkpoint.save(
        folder, step=3, gradients=True, background=background, loader=loader, **first.objects
    )
    saved = [*whole(first.tensors()), *grads_of(first.model)]
    first.backward()
    first.step()
    losses = first.run(4)
    saving.wait()
    dist.barrier()
    second, other = training(1, kind), Stateful()
    step = checkpoint.load(folder, loader=other, **second.objects).step
    loaded = [*whole(second.tensors()), *grads_of(second.model)]
    second.backward()
    second.step()
    return {
        "step": step,
        "losses": losses,
        "same losses": second.run(4) == losses,
        "same": same(whole(second.tensors()), whole(first.tensors())),
        "loader": [other.state["rank"], *other.state["order"].tolist()],
        "saved": saved,
        "loaded": loaded,
        "names": sorted(path.name for path in folder.iterdir()),
        "files": sorted(path.name for path in saving.path.iterdir()),
        "folder": folder,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_training_on_two_ranks_goes_on_bit_for_bit_between_micro_batches(kind):
    results = scenario.results("resume", kind)
    in_pieces = kind in SHARDED and kind != "replicated"
    files = ["checkpoint.json", "rank-00001-00000.safetensors", "tensors-00000.safetensors"]
    for rank, result in enumerate(results):
        assert result["step"] == 3
        assert result["same losses"]
        assert result["same"]
        assert same(result["loaded"], results[0]["saved"])
        assert result["loader"] == [rank, rank, rank + 1, rank + 2]
        assert result["names"] == [".lock", "step-00000003"]
        assert result["files"] == [name for name in files if in_pieces or name[0] != "r"]
    # The ranks drew other dropout masks and batches.
    assert results[0]["losses"] != results[1]["losses"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_loads_what_two_have_saved(kind):
    result = scenario.results("resume", kind)[0]
    alone = training(1, kind, ranks=1)
    with pytest.warns(UserWarning, match="has loader, too"):
        assert checkpoint.load(result["folder"], rng=False, **alone.objects).step == 3
    compare = same_within_a_code if kind == "8-bit moments" else same
    assert compare([*alone.tensors(), *grads_of(alone.model)], result["saved"])
    alone.run(2)


def test_one_process_does_not_load_what_each_of_two_had_of_its_own():
    folder = scenario.results("resume", "data parallel")[0]["folder"]
    one = Training.of(1)
    message = "loader was saved by 2 processes, each with a state of its own; now there are 1"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, loader=one.scheduler, rng=False)
    with pytest.raises(CheckpointError, match="rng was saved by 2 processes"):
        checkpoint.load(folder, rng=True, **one.objects)
    with pytest.warns(UserWarning, match="rng was saved by 2 processes, .* so it is not loaded"):
        checkpoint.load(folder, **one.objects)


@on_ranks(scenario, *SHARDED)
def test_two_ranks_load_what_was_saved_whole(kind):
    """Save a whole model, which is the same on both ranks, and load it into a sharded one."""
    folder = shared_folder()
    one = training(0, kind, ranks=1)
    one.run(3)
    one.backward()
    checkpoint.save(folder, step=3, gradients=True, **one.objects)
    sharded = training(1, kind)
    checkpoint.load(folder, **sharded.objects)
    loaded = [*whole(sharded.tensors()), *grads_of(sharded.model)]
    sharded.run(2)
    compare = same_within_a_code if kind == "8-bit moments" else same
    assert compare(loaded, [*one.tensors(), *grads_of(one.model)])


@on_ranks(scenario, "two kinds")
def test_states_that_pickle_refuses_are_saved_as_by_one_rank(kind):
    """Save a state that cannot be pickled, and a view of a large tensor."""
    rank, folder = dist.get_rank(), shared_folder()
    view = torch.zeros(10_000_000)[rank : rank + 1]
    counts = {"a": 1} if rank == 0 else defaultdict(lambda: 0, a=1)
    saved = Stateful({"own": defaultdict(lambda: 0, rank=rank), "view": view, "same": counts})
    checkpoint.save(folder, step=1, model=nn.Linear(1, 1), holder=saved)
    size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    assert size < 100_000
    loaded = Stateful()
    checkpoint.load(folder, holder=loaded, model=nn.Linear(1, 1))
    assert loaded.state["own"] == {"rank": rank}
    assert torch.equal(loaded.state["view"], torch.zeros(1))


PLACED = ("rows", "columns", "channels last", "tied", "a matrix without rows")


@on_ranks(scenario, *PLACED)
def test_tensor_is_loaded_into_another_placement(kind):
    """Save one placement of a tensor, and load another one."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    weight = torch.randn(3, 4, 5, 2)
    if kind == "a matrix without rows":
        weight = weight[:0]
    stored = weight.to(memory_format=torch.channels_last) if kind == "channels last" else weight
    place = {"rows": Shard(0), "columns": Shard(1)}.get(kind, Shard(2))

    def model(value, placement):
        made = nn.Module()
        value = distribute_tensor(value, mesh, [placement]) if placement else value
        made.weight = nn.Parameter(value)
        made.other = made.weight if kind == "tied" else nn.Parameter(value.detach().clone())
        return made

    folder = shared_folder()
    first = model(stored, None if kind == "channels last" else place)
    checkpoint.save(folder, step=1, model=first)
    wrong = []
    for placement in (Shard(0), Shard(1), Shard(3), None):
        second = model(torch.zeros_like(weight), placement)
        checkpoint.load(folder, model=second)
        same_as_saved = [torch.equal(one, weight) for one in whole(second.parameters())]
        wrong += [] if all(same_as_saved) else [str(placement)]
    assert wrong == [], wrong


@on_ranks(scenario, "of both", "of one")
def test_state_of_a_parameter_without_dimensions_is_sharded_if_it_was(kind):
    """Save and load a parameter without dimensions, and state that no parameter has."""
    folder, mesh = shared_folder(), init_device_mesh("cpu", (2,))

    def made(value):
        scale = torch.full((), value)
        if kind == "of both":
            scale = distribute_tensor(scale, mesh, [Replicate()])
        param = nn.Parameter(scale)
        optimizer = torch.optim.AdamW([param], lr=0.1)
        (param * param).backward()
        optimizer.step()
        return param, optimizer

    param, optimizer = made(2.0)
    checkpoint.save(folder, step=1, optimizer=optimizer)
    other, loaded = made(3.0)
    checkpoint.load(folder, optimizer=loaded)
    state, before = loaded.state[other], optimizer.state[param]
    same_as_saved = torch.equal(*whole([state["exp_avg"], before["exp_avg"]]))
    loaded.step()
    assert same_as_saved
    assert isinstance(state["exp_avg"], DTensor) == (kind == "of both")
    assert not isinstance(state["step"], DTensor)


@on_ranks(scenario, "whole", "pieces")
def test_loaded_tensors_do_not_depend_on_the_files(kind):
    """Change the file of a checkpoint after it was loaded."""
    folder = shared_folder()
    one = training(0, "float32", ranks=1 if kind == "whole" else 2)
    one.run(1)
    one.backward()
    path = checkpoint.save(folder, step=1, gradients=True, **one.objects).path
    other = training(1, "float32")
    checkpoint.load(folder, **other.objects)
    before = [*whole(other.tensors()), *grads_of(other.model)]
    dist.barrier()
    if dist.get_rank() == 0:
        for file in path.glob("*.safetensors"):
            with file.open("r+b") as opened:
                opened.write(bytes(file.stat().st_size))
    dist.barrier()
    assert same([*whole(other.tensors()), *grads_of(other.model)], before)
