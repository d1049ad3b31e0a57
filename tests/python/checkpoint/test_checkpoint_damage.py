"""Damage of a checkpoint's files is found, and a process that is killed harms no checkpoint."""

import json
import os
import random
import shutil
import signal
import sys
from itertools import count

import ampfuse
import ampfuse.checkpoint as checkpoint
import pytest
import torch
from ampfuse.checkpoint import CheckpointError, _index
from checkpointed import Training, same
from torch import nn


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    training = Training.of(0)
    training.run(3)
    folder = tmp_path_factory.mktemp("run")
    return training, checkpoint.save(folder, step=3, values={"epoch": 1}, **training.objects).path


@pytest.fixture
def path(saved, tmp_path):
    return shutil.copytree(saved[1], tmp_path / "copy")


def flip(file, bit):
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ (1 << bit % 8)]))


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_found(path):
    """Flip a bit of each third byte: no tensor, hash or length has fewer bytes."""
    chosen = random.Random(0)
    for file in path.iterdir():
        for byte in range(0, file.stat().st_size, 3):
            bit = 8 * byte + chosen.randrange(8)
            flip(file, bit)
            with pytest.raises(CheckpointError):
                checkpoint.verify(path)
            flip(file, bit)
    assert checkpoint.verify(path) == path


def test_tensor_of_a_flipped_bit_is_named_and_nothing_is_loaded(saved, path):
    file = path / "tensors-00000.safetensors"
    weights = saved[0].model[4].weight
    place = file.read_bytes().index(weights.detach().numpy().tobytes())
    flip(file, 8 * place + 3)
    other = Training.of(1)
    before = [tensor.clone() for tensor in other.tensors()]
    message = "model/state/4.weight: the tensor has changed since it was written"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, **other.objects)
    assert same(other.tensors(), before)
    # A part that is intact can be loaded.
    for name in ("optimizer", "scheduler"):
        with pytest.warns(UserWarning, match=r"has .*model, .*, too, which is not loaded"):
            checkpoint.load(path, **{name: other.objects[name]})


class Average:
    def state_dict(self):
        return {"steps": 3}

    def load_state_dict(self, state):
        assert state == self.state_dict()


@pytest.mark.filterwarnings("error")
def test_models_and_other_objects_may_be_loaded_without_what_trains_them(tmp_path):
    training, average = Training.of(0), Average()
    checkpoint.save(tmp_path, step=1, average=average, **training.objects)
    checkpoint.load(tmp_path, model=training.model, average=average)


@pytest.mark.parametrize("name", ["tensors-00000.safetensors", "checkpoint.json"])
def test_files_that_are_cut_short_are_found(path, name):
    content = (path / name).read_bytes()
    expected = "the file has changed" if name == "checkpoint.json" else f"{len(content):,} bytes"
    for length in (0, 7, 100, -1):  # 7 are too few for the length of a header
        (path / name).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=expected):
            checkpoint.verify(path)


def test_missing_files_are_named(path):
    (path / "tensors-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensors-00000.safetensors: this file is missing"):
        checkpoint.verify(path)
    (path / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match="there is no complete checkpoint here"):
        checkpoint.verify(path)


def test_tensors_that_are_swapped_are_found(path):
    """The files are those of another checkpoint, of which each tensor is intact."""
    other = Training.of(1)
    other.run(3)
    second = checkpoint.save(path.parent / "run", step=3, **other.objects).path
    shutil.copy(second / "tensors-00000.safetensors", path)
    with pytest.raises(CheckpointError, match="has changed since it was written"):
        checkpoint.verify(path)


def test_newer_format_is_refused(saved, path):
    content = json.loads((path / "checkpoint.json").read_text())
    del content["hash"]
    content |= {"format": 2, "ampfuse": "9.1"}
    _index.write(path, content)
    message = "written in format 2 by ampfuse 9.1; this version reads formats up to 1"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, model=saved[0].model)


class Loud:
    """A value whose unpickling would be noticed."""

    def __reduce__(self):
        return (pytest.fail, ("it was executed",))


def test_pickled_files_are_refused(path):
    torch.save({"model": Loud()}, path / "checkpoint.json")
    with pytest.raises(CheckpointError, match="has changed"):
        checkpoint.load(path, model=nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda one: setattr(one, "model", nn.Linear(8, 16)),
            "model: the checkpoint has 0.weight, which the model lacks",
        ),
        (
            lambda one: one.model.append(nn.Linear(1, 1)),
            "the model has 5.weight, which the checkpoint lacks",
        ),
        (
            lambda one: one.model.__setitem__(4, nn.Linear(16, 5)),
            r"4.weight is torch.float32 of shape \[4, 16\] in the checkpoint, and torch.float32 of "
            r"shape \[5, 16\] in the model",
        ),
        (
            lambda one: one.model[4].bfloat16(),
            r"4.bias is torch.float32 of shape \[4\] in the checkpoint, and torch.bfloat16 of",
        ),
        (
            lambda one: setattr(one, "optimizer", ampfuse.AdamW(list(one.model.parameters())[:5])),
            r"optimizer: its groups have \[5\] parameters, those in the checkpoint \[6\]",
        ),
        (
            lambda one: setattr(one, "optimizer", torch.optim.SGD(one.model.parameters())),
            "optimizer: the checkpoint has the state of AdamW, not of SGD",
        ),
        (
            lambda one: setattr(one, "loader", one.scheduler),
            "it has no loader, only model, optimizer, scaler, scheduler",
        ),
    ],
)
def test_objects_that_do_not_fit_are_named_and_nothing_is_loaded(path, change, message):
    other = Training.of(1)
    other.run(1)
    change(other)
    before = [tensor.clone() for tensor in other.tensors()]
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, **other.objects)
    assert same(other.tensors(), before)


def test_model_is_not_loaded_if_a_scheduler_refuses_its_state(tmp_path):
    def made(parts):
        model = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = [torch.optim.lr_scheduler.ConstantLR(optimizer) for _ in range(parts)]
        rate = torch.optim.lr_scheduler.SequentialLR(optimizer, rates, [5, 9][: parts - 1])
        return {"model": model, "scheduler": rate}

    checkpoint.save(tmp_path, step=1, **made(2))
    other = made(1)
    weight = other["model"].weight.clone()
    with pytest.raises(IndexError):
        checkpoint.load(tmp_path, **other)
    assert torch.equal(other["model"].weight, weight)


class Wrapper:
    """An object with the state of a model, but no module."""

    def __init__(self, model):
        self.state_dict, self.load_state_dict = model.state_dict, model.load_state_dict


def test_state_of_another_object_is_not_loaded_into_a_model(tmp_path):
    checkpoint.save(tmp_path, step=1, model=Wrapper(nn.Linear(3, 2)))
    with pytest.raises(CheckpointError, match="the state of Wrapper, which was no module"):
        checkpoint.load(tmp_path, model=nn.Linear(3, 2))


@pytest.mark.parametrize("cls", [ampfuse.AdamW, torch.optim.AdamW])
def test_nothing_is_loaded_if_parameters_of_an_optimizer_have_other_shapes(tmp_path, cls):
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False))
    optimizer, scheduled = cls(model.parameters()), torch.optim.SGD(model.parameters(), 0.1)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(scheduled, 1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer, scheduler=scheduler)
    other = cls(reversed(list(model.parameters())))
    scheduler.last_epoch = 7
    with pytest.raises(CheckpointError, match=r"exp_avg of parameter 0 has shape \[4, 8\]"):
        checkpoint.load(tmp_path, model=model, optimizer=other, scheduler=scheduler)
    assert scheduler.last_epoch == 7
    assert not other.state


def test_nothing_is_loaded_if_the_scaler_was_disabled(tmp_path):
    model = nn.Linear(3, 2)
    scaler = ampfuse.GradScaler("cpu", enabled=False)
    optimizer = ampfuse.AdamW(model.parameters(), lr=0.1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer, scaler=scaler)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(CheckpointError, match="a disabled scaler, and this one is enabled"):
        checkpoint.load(tmp_path, optimizer=optimizer, scaler=ampfuse.GradScaler("cpu"))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_nothing_is_loaded_if_a_gradient_has_another_dtype(tmp_path):
    saved, other = (nn.Linear(3, 2, dtype=torch.bfloat16) for _ in range(2))
    saved.weight.grad_dtype = torch.float32
    saved.weight.grad = torch.ones(2, 3)
    checkpoint.save(tmp_path, step=1, model=saved, gradients=True)
    before = other.weight.clone()
    with pytest.raises(CheckpointError, match=r"gradient of weight is torch\.float32 in the check"):
        checkpoint.load(tmp_path, model=other)
    assert torch.equal(other.weight, before)


EVENTS = ("open", "os.", "shutil.", "fcntl.")  # audit events of what changes files or locks


def save(folder, step, **options):
    """Save a model whose tensors all hold the step."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    for param in model.parameters():
        nn.init.constant_(param, step)
    return checkpoint.save(folder, step=step, model=model, values=step, keep=1, **options)


def save_twice(folder, background, last):
    """Save steps 2 and 3 in a process that is killed before the event of this number."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        events = count()

        def kill(event, _):
            if event.startswith(EVENTS) and next(events) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(kill)
            save(folder, 2, background=background)
            save(folder, 3, background=background).wait()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("background", [False, True])
def test_kill_before_any_change_of_a_file_loses_nothing(tmp_path, background):
    """The last checkpoint stays, and no half of one."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    steps, unfinished = [], 0
    for last in count():
        folder = tmp_path / str(last)
        save(folder, 1)
        code = save_twice(folder, background, last)
        assert code in (0, -signal.SIGKILL)
        names = [path.name for path in folder.iterdir()]
        unfinished += any(name.startswith(".unfinished") for name in names)
        checkpoint.verify(folder)
        found = checkpoint.load(folder, model=model)
        assert found.step == found.values
        assert all((param == found.step).all() for param in model.parameters())
        steps.append(found.step)
        save(folder, 4)  # removes what is left
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000004"]
        if code == 0:
            break
    assert set(steps) == {1, 2, 3}
    assert unfinished > 10
