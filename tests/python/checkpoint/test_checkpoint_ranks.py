"""Two processes write one checkpoint, and load it together."""

import ampfuse.checkpoint as checkpoint
import pytest
import torch
import torch.distributed as dist
from ampfuse.checkpoint import CheckpointError
from ampfuse.checkpoint._ranks import from_bytes, to_bytes
from checkpointed import Training, error_of, same, shared_folder
from processes import Scenarios
from torch import nn
from torch.nn.parallel import DistributedDataParallel

scenario = Scenarios()


class Loader:
    """A loader whose position differs between ranks."""

    def __init__(self):
        self.state = {"rank": dist.get_rank(), "order": torch.arange(3) + dist.get_rank()}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def training(seed, kind):
    options = {"dtype": torch.bfloat16, "master_weights": True} if kind == "bfloat16" else {}
    made = Training.of(seed, **options)
    made.model = DistributedDataParallel(made.model)
    torch.manual_seed(100 * seed + dist.get_rank())
    return made


@scenario("float32", "bfloat16", "background")
def resume(kind):
    folder = shared_folder()
    first, loader = training(0, kind), Loader()
    first.run(3)
    saving = checkpoint.save(
        folder, step=3, loader=loader, background=kind == "background", **first.objects
    )
    losses = first.run(4)
    saving.wait()
    dist.barrier()
    second, other = training(1, kind), Loader()
    other.state = {}
    found = checkpoint.load(folder, loader=other, **second.objects)
    return {
        "step": found.step,
        "names": sorted(path.name for path in folder.iterdir()),
        "path": str(saving.path),
        "same losses": second.run(4) == losses,
        "losses": losses,
        "same": same(second.tensors(), first.tensors()),
        "loader": other.state["rank"],
        "order": other.state["order"].tolist(),
        "folder": str(folder),
    }


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "background"])
def test_training_on_two_ranks_goes_on_bit_for_bit(kind):
    results = scenario.results("resume", kind)
    for rank, result in enumerate(results):
        assert result["step"] == 3
        assert result["names"] == [".lock", "step-00000003"]
        assert result["path"].endswith("step-00000003")
        assert result["same losses"]
        assert result["same"]
        assert (result["loader"], result["order"]) == (rank, [rank, rank + 1, rank + 2])
    # The ranks drew other dropout masks and batches.
    assert results[0]["losses"] != results[1]["losses"]


def test_one_process_loads_what_two_have_saved_except_what_each_had_of_its_own():
    folder = scenario.results("resume", "float32")[0]["folder"]
    one = Training.of(1)
    with pytest.warns(UserWarning, match="has loader, too"):
        assert checkpoint.load(folder, rng=False, **one.objects).step == 3
    message = "loader was saved by 2 processes, each with a state of its own; now there are 1"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(folder, loader=one.scheduler, rng=False)
    with pytest.raises(CheckpointError, match="rng was saved by 2 processes"):
        checkpoint.load(folder, rng=True, **one.objects)
    with pytest.warns(UserWarning, match="rng was saved by 2 processes, .* so it is not loaded"):
        checkpoint.load(folder, **one.objects)


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


def test_column_of_one_element_is_sent_as_bytes():
    column = torch.ones(3, 4)[:1, 0]
    assert column.stride() == (4,)
    assert torch.equal(from_bytes(*to_bytes(column)), column)
