"""Sharded models and optimizers are saved in pieces, and loaded by any number of processes."""

import time

import ampfuse
import ampfuse.checkpoint as checkpoint
import pytest
import torch
import torch.distributed as dist
from ampfuse.checkpoint import CheckpointError, _save, _write
from checkpointed import Training, error_of, same, shared_folder
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

scenario = Scenarios()
KINDS = {
    "float32": {},
    "torch's AdamW": {"make": torch.optim.AdamW},
    "bfloat16 with masters": {"dtype": torch.bfloat16, "master_weights": True},
    "bfloat16 with remainders": {"dtype": torch.bfloat16, "master_weights": "remainder"},
    "float16 with masters": {"dtype": torch.float16, "master_weights": True},
    "background": {},
    "replicated": {},
}


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("shards"))


def training(seed, kind, *, ranks=2):
    """Return a training whose model is sharded over two ranks, with shards of two sizes."""
    options = {"make": ampfuse.AdamW, "dtype": torch.float32} | KINDS[kind]
    make, dtype = options.pop("make"), options.pop("dtype")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 15), nn.Dropout(0.3), nn.ReLU(), nn.Linear(15, 4)).to(dtype)
    if ranks == 2:
        sizes, names = ((2, 1), ("all", "shards")) if kind == "replicated" else ((2,), ("all",))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
    optimizer = make(model.parameters(), lr=0.05, **options)
    scaler = ampfuse.GradScaler("cpu", growth_interval=3, history=8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    if ranks == 2:
        torch.manual_seed(100 * seed + dist.get_rank())
    return Training(model, optimizer, scaler, scheduler)


def whole(tensors):
    every = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return [one.clone() for one in every]


def grads_of(model):
    return whole(param.grad for param in model.parameters())


@scenario(*KINDS)
def resume(kind):
    folder = shared_folder()
    first = training(0, kind)
    first.run(3)
    first.backward()
    saving = checkpoint.save(
        folder, step=3, gradients=True, background=kind == "background", **first.objects
    )
    saved, grads = whole(first.tensors()), grads_of(first.model)
    first.backward()
    first.step()
    losses = first.run(4)
    saving.wait()
    dist.barrier()
    second = training(1, kind)
    checkpoint.load(folder, **second.objects)
    loaded, loaded_grads = whole(second.tensors()), grads_of(second.model)
    second.backward()
    second.step()
    return {
        "losses": losses,
        "same losses": second.run(4) == losses,
        "same": same(whole(second.tensors()), whole(first.tensors())),
        "same as saved": same([*loaded, *loaded_grads], [*saved, *grads]),
        "saved": saved,
        "grads": grads,
        "files": sorted(path.name for path in (folder / "step-00000003").iterdir()),
        "folder": folder,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_training_goes_on_bit_for_bit_between_micro_batches(kind):
    results = scenario.results("resume", kind)
    for result in results:
        assert result["same losses"]
        assert result["same"]
        assert result["same as saved"]
        files = ["checkpoint.json", "rank-00001-00000.safetensors", "tensors-00000.safetensors"]
        assert result["files"] == [name for name in files if kind != "replicated" or name[0] != "r"]
    assert results[0]["losses"] != results[1]["losses"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_loads_what_two_have_saved_in_pieces(kind):
    result = scenario.results("resume", kind)[0]
    alone = training(1, kind, ranks=1)
    assert checkpoint.load(result["folder"], rng=False, **alone.objects).step == 3
    assert same(alone.tensors(), result["saved"])
    assert same(grads_of(alone.model), result["grads"])
    alone.run(2)


@scenario(*KINDS)
def spread(kind):
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
    return {"same": same(loaded, [*one.tensors(), *grads_of(one.model)])}


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_load_what_was_saved_whole(kind):
    assert all(result["same"] for result in scenario.results("spread", kind))


PLACED = ("rows", "columns", "channels last", "tied", "a matrix without rows")


@scenario(*PLACED)
def reshard(kind):
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
    return {"wrong": wrong}


@pytest.mark.parametrize("kind", PLACED)
def test_tensor_is_loaded_into_another_placement(kind):
    assert [result["wrong"] for result in scenario.results("reshard", kind)] == [[], []]


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


@scenario("of both", "of one")
def numbers(kind):
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
    loaded.step()
    return {
        "same": all(torch.equal(*whole([state[name], before[name]])) for name in ("exp_avg",)),
        "kinds": [type(state[name]).__name__ for name in ("exp_avg", "step")],
    }


@pytest.mark.parametrize(("kind", "expected"), [("of both", "DTensor"), ("of one", "Tensor")])
def test_state_of_a_parameter_without_dimensions_is_sharded_if_it_was(kind, expected):
    for result in scenario.results("numbers", kind):
        assert result["kinds"] == [expected, "Tensor"]


@scenario("whole", "pieces")
def mapped(kind):
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
    return {"same": same([*whole(other.tensors()), *grads_of(other.model)], before)}


@pytest.mark.parametrize("kind", ["whole", "pieces"])
def test_loaded_tensors_do_not_depend_on_the_files(kind):
    assert all(result["same"] for result in scenario.results("mapped", kind))


@scenario("also its note", "out of memory")
def unwritten(kind):
    """Let rank 1 fail in the background in ways that leave no note, or no text."""
    folder = shared_folder()
    model = training(0, "float32").model

    def fail(*_):
        raise MemoryError if kind == "out of memory" else OSError(28, "No space left on device")

    if dist.get_rank() == 1:
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
    _save.write_files, _write.leave_note = _write.write_files, _save.leave_note
    saved = checkpoint.save(folder, step=2, model=model).path.name
    return {"error": error, "saved": saved}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("kind", "texts"),
    [
        ("also its note", ("rank 1: it could not write its part, nor say why", "No space left")),
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
    assert "rank 1 has not written its part in 0 seconds" in first["error"]
    assert "the checkpoint of step 2 could not be written" in second["error"]
    assert first["names"] == [".lock"]
