"""Four ranks save a model that is tensor parallel within FSDP, and load it on other meshes."""

from types import SimpleNamespace

import ampfuse
import ampfuse.checkpoint as checkpoint
import pytest
import torch
from ampfuse.checkpoint._shards import is_one_region
from checkpointed import same, shared_folder
from on_ranks import on_ranks
from processes import Scenarios
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)
MESHES = ("FSDP 2 × tensor 2", "FSDP 4", "tensor 4", "replicas 2 × FSDP 2", "whole")


def made(seed, kind):
    """Return a model on a mesh, and its optimizer after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if kind == "FSDP 2 × tensor 2":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "tensor"))
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["shards"])
    elif kind == "tensor 4":
        parallelize_module(model, init_device_mesh("cpu", (4,)), plan)
    elif kind != "whole":
        sizes = (4,) if kind == "FSDP 4" else (2, 2)
        names = ("replicas", "shards")[-len(sizes) :]
        fully_shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    optimizer = ampfuse.AdamW(model.parameters(), lr=0.05)
    for _ in range(2):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def tensors_of(objects):
    state = objects["optimizer"].state_dict()["state"].values()
    found = [*objects["model"].state_dict().values()]
    found += [one for entries in state for one in entries.values()]
    return [one.full_tensor() if isinstance(one, DTensor) else one.clone() for one in found]


@on_ranks(scenario, *MESHES)
def test_any_mesh_loads_what_another_one_has_saved(kind):
    folder = shared_folder()
    first = made(0, kind)
    checkpoint.save(folder, step=2, **first)
    saved, wrong = tensors_of(first), []
    for other in MESHES:
        second = made(1, other)
        checkpoint.load(folder, **second)
        wrong += [] if same(tensors_of(second), saved) else [other]
    files = [path for path in (folder / "step-00000002").iterdir() if path.suffix != ".json"]
    assert wrong == [], wrong
    assert len(files) == {"replicas 2 × FSDP 2": 2, "whole": 1}.get(kind, 4), files


def strided(dim, factor):
    """Return a placement like that of a tensor parallel weight in FSDP."""
    return SimpleNamespace(dim=dim, split_factor=factor, is_partial=lambda: False)


@pytest.mark.parametrize(
    ("shape", "placements", "expected"),
    [
        ((8, 3), (Shard(0), Shard(1)), True),
        ((7, 3), (Shard(0), Replicate()), True),
        ((8, 3), (Shard(0), Partial()), False),
        ((8, 3), (strided(0, 2), Shard(0)), True),
        ((8, 3), (strided(0, 3), Shard(0)), False),
        ((7, 3), (strided(0, 2), Shard(0)), False),
        ((8, 3), (strided(0, 2), Shard(1)), False),
        ((8, 3), (Shard(0), strided(0, 2)), False),
    ],
)
def test_only_placements_that_are_one_region_are_stored(shape, placements, expected):
    mesh = SimpleNamespace(ndim=2, size=lambda dim: 2)
    assert is_one_region(shape, mesh, placements) == expected
