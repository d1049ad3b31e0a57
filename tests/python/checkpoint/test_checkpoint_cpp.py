"""Checkpoints of C++ programs are read and written by Python, and the reverse."""

import json

import ampfuse.checkpoint as checkpoint
import ampfuse_cpp
import pytest
import torch
from ampfuse.checkpoint import CheckpointError, _index
from ampfuse.checkpoint._shards import Region, Shard
from ampfuse.checkpoint._write import joined, write_files
from checkpointed import KINDS, Training, same

cpp = ampfuse_cpp.checkpoint
# The names of C++ for kinds of training.
NAMES = {
    "float32": "float32",
    "masters": "bfloat16 with masters",
    "remainders": "bfloat16 with remainders",
    "8 bits": "8-bit moments",
}


class Python(Training):
    """A training like that of C++, which has no scheduler."""

    def __init__(self, seed, kind):
        vars(self).update(vars(Training.of(seed, **KINDS[NAMES[kind]])))
        del self.scheduler

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def tensors(self):
        state = [self.optimizer.state[param] for param in self.model.parameters()]
        moments = [
            name + end
            for name in ("exp_avg", "exp_avg_sq")
            for end in ("", "_codes", "_units")  # as numbers, or in 8 bits
        ]
        names = ("step", *moments, "master_param", "ema_param")
        found = [value for _, value in sorted(self.model.state_dict().items())]
        return found + [one[name] for one in state for name in names if name in one]

    def history(self):
        return [tuple(record) for record in self.scaler.history()]

    def save(self, folder, step, *, gradients=False):
        checkpoint.save(folder, step=step, gradients=gradients, values="Python", **self.objects)

    def load(self, folder):
        return checkpoint.load(folder, **self.objects).step


LANGUAGES = {"Python": Python, "C++": cpp.Training}


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(("writer", "reader"), [("Python", "C++"), ("C++", "Python")])
def test_training_goes_on_in_the_other_language_bit_for_bit(tmp_path, writer, reader, kind):
    folder = str(tmp_path)
    first = LANGUAGES[writer](0, kind)
    first.run(5)
    first.backward()
    first.save(folder, 5, gradients=True)
    losses = first.run(4)
    second = LANGUAGES[reader](1, kind)
    second.run(2)
    assert second.load(folder) == 5
    assert second.run(4) == losses
    assert same(second.tensors(), first.tensors())
    assert second.history() == first.history()
    assert len(first.history()) == 8
    # The first language goes on from what the other one saves, without gradients.
    second.save(folder, 9)
    losses = second.run(3)
    third = LANGUAGES[writer](2, kind)
    assert third.load(folder) == 9
    assert third.run(3) == losses


def test_each_language_verifies_the_files_of_the_other(tmp_path):
    cpp.Training(0, "masters").save(str(tmp_path / "cpp"), 3)
    path = checkpoint.verify(tmp_path / "cpp")
    assert path == tmp_path / "cpp" / "step-00000003"
    file = path / "tensors-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="the tensor has changed since it was written"):
        checkpoint.verify(tmp_path / "cpp")
    checkpoint.save(tmp_path / "python", step=4, values=torch.zeros(3))
    assert cpp.verify(str(tmp_path / "python")).endswith("step-00000004")


def test_both_languages_hash_tensors_of_all_lengths_alike(tmp_path):
    lengths = [*range(601), 1023, 1024, 1025, 1088, 1089, 2048, 2049, 100_003]
    values = [torch.randint(256, (length,), dtype=torch.uint8) for length in lengths]
    checkpoint.save(tmp_path / "a", step=1, values=values)
    cpp.copy_values(str(tmp_path / "a"), str(tmp_path / "b"))
    assert same(checkpoint.load(tmp_path / "b").values, values)


def test_values_of_python_survive_a_cpp_program(tmp_path):
    image = torch.arange(24.0).reshape(1, 2, 3, 4)
    values = {
        "numbers": [1, -2.5, 1e300, 2.0, float("inf"), True, None, 2**62],
        "text": 'Größe 😀 "\\\n\x01',
        "tuple": (torch.arange(3, dtype=torch.int16), torch.ones(2, dtype=torch.bfloat16)),
        "dict": {1: "a", "$b": [torch.zeros(0, 3)]},
        "channels last": image.to(memory_format=torch.channels_last),
    }
    checkpoint.save(tmp_path / "a", step=1, values=values)
    cpp.copy_values(str(tmp_path / "a"), str(tmp_path / "b"))
    found = checkpoint.load(tmp_path / "b").values
    assert list(found) == list(values)
    for name in ("numbers", "text"):
        assert found[name] == values[name]
    assert same(list(found["tuple"]), list(values["tuple"]))
    assert found["dict"][1] == "a"
    assert found["dict"]["$b"][0].shape == (0, 3)
    assert torch.equal(found["channels last"], values["channels last"])


@pytest.mark.parametrize(
    ("name", "message"), [("rng", None), ("scaler", "scaler was saved by several ranks")]
)
def test_cpp_reads_what_several_ranks_have_saved_except_what_each_had_of_its_own(
    tmp_path, capfd, name, message
):
    """Store a part of a checkpoint for two ranks, as they would have written it."""
    first = Python(0, "float32")
    first.run(2)
    first.save(tmp_path, 2)
    path = checkpoint.latest(tmp_path)
    index = json.loads((path / _index.NAME).read_text())
    index["parts"][name] = {"$ranks": [index["parts"][name]] * 2}
    _index.write(path, {key: index[key] for key in ("step", "parts", "files", "tensors")})
    second = cpp.Training(1, "float32")
    before = [tensor.clone() for tensor in second.tensors()]
    if message:
        with pytest.raises(cpp.Error, match=message):
            second.load(str(tmp_path))
        assert same(second.tensors(), before)
    else:
        assert second.load(str(tmp_path)) == 2
        assert same(second.tensors(), first.tensors())
        assert "rng was saved by several ranks" in capfd.readouterr().err


def test_cpp_assembles_what_several_ranks_have_saved_in_pieces(tmp_path):
    """Cut a tensor of a checkpoint in two, as two ranks would have written it."""
    whole = torch.arange(12.0).reshape(3, 4)
    path = checkpoint.save(tmp_path / "a", step=1, values=whole, rng=False).path
    index = json.loads((path / _index.NAME).read_text())
    parts = []
    for rank, (start, stop) in enumerate([(0, 3), (3, 4)]):
        shard = Shard((3, 4), Region((0, start), (3, stop - start)), True)
        parts.append(write_files(path, {"values": whole[:, start:stop]}, {"values": shard}, rank))
    content = {name: index[name] for name in ("step", "parts")}
    _index.write(path, content | joined(parts))
    cpp.copy_values(str(tmp_path / "a"), str(tmp_path / "b"))
    assert torch.equal(checkpoint.load(tmp_path / "b").values, whole)
    assert torch.equal(checkpoint.load(tmp_path / "a").values, whole)


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("ampfuse::SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
        ("ampfuse::SGD", torch.optim.SGD, {"lr": 0.1}),
        ("AdamW", torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}),
        ("RMSprop", torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}),
        ("Adagrad", torch.optim.Adagrad, {"lr": 1, "lr_decay": 0.1}),
    ],
)
def test_optimizers_of_torch_go_on_in_the_other_language(tmp_path, name, make, options):
    def objects():
        model = torch.nn.Linear(4, 3)
        return {"model": model, "optimizer": make(model.parameters(), **options)}

    def train(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()

    first, second = objects(), objects()
    train(**first)
    checkpoint.save(tmp_path, step=3, **first)
    cpp.train_with(name, str(tmp_path), 3)
    train(**first)
    assert checkpoint.load(tmp_path, **second).step == 6
    train(**first)
    train(**second)
    torch.testing.assert_close(second["model"].state_dict(), first["model"].state_dict())


def test_cpp_refuses_options_that_the_optimizers_of_torch_lack_there(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    with pytest.raises(cpp.Error, match=r"has maximize=True, which C\+\+'s SGD lacks"):
        cpp.train_with("SGD", str(tmp_path), 1)


def test_cpp_refuses_integers_that_do_not_fit(tmp_path):
    checkpoint.save(tmp_path / "a", step=1, values=2**63 - 1)
    cpp.copy_values(str(tmp_path / "a"), str(tmp_path / "b"))
    assert checkpoint.load(tmp_path / "b").values == 2**63 - 1
    checkpoint.save(tmp_path / "a", step=2, values=2**63)
    with pytest.raises(cpp.Error, match="does not fit into int64: 9223372036854775808"):
        cpp.copy_values(str(tmp_path / "a"), str(tmp_path / "b"))


def test_cpp_refuses_a_checkpoint_of_a_newer_format(tmp_path, monkeypatch):
    monkeypatch.setattr(_index, "FORMAT", 2)
    checkpoint.save(tmp_path, step=1)
    with pytest.raises(cpp.Error, match="written in format 2 by ampfuse "):
        cpp.verify(str(tmp_path))
