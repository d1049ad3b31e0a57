"""Training goes on from a checkpoint as if it had never stopped, bit for bit."""

import random
from argparse import Namespace

import ampfuse
import ampfuse.checkpoint as checkpoint
import numpy as np
import pytest
import torch
from checkpointed import KINDS, Training, same
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def go_on(training):
    losses = [training.backward()]
    training.step()
    return losses + training.run(6)


# A save in the background does all that another one does, and copies first. These are between two
# micro-batches.
@pytest.mark.parametrize(
    ("kind", "background"), [*((kind, True) for kind in KINDS), ("float32", False)]
)
def test_losses_and_state_after_resuming_are_the_same(tmp_path, kind, background):
    first = Training.of(0, **KINDS[kind])
    first.run(5)
    if background:
        first.backward()
    options = {"gradients": background, "background": background, "values": {"micro_batch": 1}}
    saving = checkpoint.save(tmp_path, step=5, **options, **first.objects)
    losses = go_on(first)
    saving.wait()
    second = Training.of(1, **KINDS[kind])
    second.run(2)
    _, step, values = checkpoint.load(tmp_path, **second.objects)
    assert (step, values) == (5, {"micro_batch": 1})
    assert go_on(second) == losses
    assert same(second.tensors(), first.tensors())
    assert second.scaler.state_dict() == first.scaler.state_dict()
    assert second.scheduler.state_dict() == first.scheduler.state_dict()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers_of_torch_go_on_with_channels_last_weights(tmp_path, kind):
    def made(seed):
        torch.manual_seed(seed)
        model = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return model, kind(model.parameters(), lr=0.01, fused=True, **options)

    def run(model, optimizer):
        for _ in range(3):
            model(torch.randn(4, 8, 5, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    first, second = made(0), made(1)
    run(*first)
    first[0](torch.randn(4, 8, 5, 5)).sum().backward()
    checkpoint.save(tmp_path, step=3, model=first[0], optimizer=first[1], gradients=True)
    run(*first)
    checkpoint.load(tmp_path, model=second[0], optimizer=second[1])
    run(*second)
    assert torch.equal(second[0].weight, first[0].weight)


def test_extra_state_of_modules_comes_back(tmp_path):
    class Extra(nn.Module):
        extra = None

        def get_extra_state(self):
            return self.extra

        def set_extra_state(self, state):
            self.extra = state

    for value in ({"a": torch.ones(3)}, np.ones(2), torch.zeros(5, dtype=torch.uint8), None):
        first, second = Extra(), Extra()
        first.extra, second.extra = value, torch.zeros(0)
        checkpoint.save(tmp_path, step=0, model=first)
        checkpoint.load(tmp_path, model=second)
        assert repr(second.extra) == repr(value)


def test_models_of_fsdp_are_refused(tmp_path):
    class FullyShardedDataParallel(nn.Linear):
        pass

    with pytest.raises(TypeError, match="save: models of FullyShardedDataParallel are not supp"):
        checkpoint.save(tmp_path, step=0, model=nn.Sequential(FullyShardedDataParallel(1, 1)))


def test_history_of_a_scaler_goes_on(tmp_path):
    first, second = Training.of(0), Training.of(1)
    first.run(5)
    first.model[0].weight.grad = torch.full_like(first.model[0].weight, torch.inf)
    first.step()
    checkpoint.save(tmp_path, step=6, **first.objects)
    for used in (False, True):  # a scaler that has its counters on a device, too
        checkpoint.load(tmp_path, **second.objects)
        if not used:
            assert second.scaler.history()[-1].skipped
        first_records = [str(one) for one in first.scaler.history()]
        assert [str(one) for one in second.scaler.history()] == first_records
        second.run(3)
        assert len(second.scaler.history()) == 8
        assert [str(one) for one in second.scaler.history()][:5] == first_records[1:]


def test_random_numbers_of_python_numpy_and_torch_go_on_only_on_request(tmp_path):
    def draw():
        return random.random(), float(np.random.standard_normal()), torch.rand(2).tolist()

    model = nn.Linear(2, 2)
    for objects in ({}, {"model": model}):
        checkpoint.save(tmp_path, step=0, **objects)
        numbers = draw()
        after = torch.get_rng_state()
        checkpoint.load(tmp_path, **objects)
        assert torch.equal(torch.get_rng_state(), after)
        assert draw() != numbers
        checkpoint.load(tmp_path, rng=True, **objects)
        assert draw() == numbers
    # With an optimizer, training goes on, and so do the random numbers.
    objects["optimizer"] = torch.optim.SGD(model.parameters())
    checkpoint.save(tmp_path, step=1, **objects)
    numbers = draw()
    checkpoint.load(tmp_path, rng=False, **objects)
    assert draw() != numbers
    checkpoint.load(tmp_path, **objects)
    assert draw() == numbers


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[1].weight = model[0].weight
        return model

    model, other = tied(), tied()
    path = checkpoint.save(tmp_path, step=0, model=model, rng=False).path
    assert sum(file.stat().st_size for file in path.iterdir()) < 1.5 * 64 * 64 * 4
    checkpoint.load(tmp_path, model=other)
    assert other[1].weight is other[0].weight
    assert torch.equal(other[0].weight, model[0].weight)


def test_wrappers_of_compile_and_ddp_do_not_change_names(tmp_path, single_process_group):
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    checkpoint.save(tmp_path, step=0, model=torch.compile(DistributedDataParallel(model)))
    checkpoint.load(tmp_path, model=other)
    assert torch.equal(other.weight, model.weight)
    path = checkpoint.save(tmp_path, step=1, model=other).path
    checkpoint.load(path, model=DistributedDataParallel(torch.compile(model)))


@pytest.fixture
def single_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_optimizer_of_torch_goes_on_as_ours(tmp_path):
    first = Training.of(0, make=torch.optim.AdamW)
    first.run(3)
    checkpoint.save(tmp_path, step=3, **first.objects)
    losses = first.run(3)
    second = Training.of(1)
    checkpoint.load(tmp_path, **second.objects)
    assert second.run(3) == pytest.approx(losses, rel=1e-5)


def test_8_bit_moments_go_on_in_optimizers_of_torch(tmp_path):
    model = nn.Linear(64, 8)
    options = {"lr": 0.1, "momentum": 0.9}
    optimizer = ampfuse.SGD(model.parameters(), momentum_dtype="8bit", **options)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = torch.optim.SGD(model.parameters(), **options)
    checkpoint.load(tmp_path, model=model, optimizer=other)
    (momentum, _) = (other.state[param]["momentum_buffer"] for param in model.parameters())
    torch.testing.assert_close(momentum, model.weight.grad, rtol=0.02, atol=0)
    assert all("codes" not in name for state in other.state.values() for name in state)


class Lookahead(torch.optim.Optimizer):
    """An optimizer with a state dict of a form of its own."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.slow = base, 0

    def state_dict(self):
        return {"fast": self.base.state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict["fast"])
        self.slow = state_dict["slow"]


def test_optimizer_with_a_state_of_its_own_form_comes_back(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    optimizer.slow = 5
    checkpoint.save(tmp_path, step=1, model=model, optimizer=optimizer)
    other = Lookahead(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    checkpoint.load(tmp_path, model=model, optimizer=other)
    assert other.slow == 5


def test_optimizer_state_that_belongs_to_no_parameter_comes_back(tmp_path):
    optimizer, other = (torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    optimizer.state["global"] = {"calls": 3}
    checkpoint.save(tmp_path, step=1, optimizer=optimizer)
    checkpoint.load(tmp_path, optimizer=other)
    assert other.state["global"] == {"calls": 3}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": -1}, ValueError, "save: step: expected at least 0, got -1"),
        ({"step": 1, "keep": 0}, ValueError, "save: keep: expected at least 1, got 0"),
        ({"step": 1, "keep": 2.0}, TypeError, "save: keep: expected an int, got float"),
        (
            {"step": 1, "loader": []},
            TypeError,
            "save: loader: expected an object with state_dict and load_state_dict, got list; "
            "torchdata.stateful_dataloader.StatefulDataLoader has them",
        ),
        ({"step": 1, "values": {"args": Namespace(lr=1)}}, TypeError, "; use vars(args)"),
        ({"step": 1, "values": {"f": print}}, TypeError, "save: values/f is of <class 'builtin_"),
        (
            {"step": 1, "values": torch.eye(2).to_sparse()},
            TypeError,
            "save: values: a tensor of this kind cannot be stored: Tensor, torch.sparse_coo",
        ),
    ],
)
def test_wrong_arguments_are_refused_and_nothing_is_written(tmp_path, arguments, error, message):
    with pytest.raises(error) as caught:
        checkpoint.save(tmp_path / "run", **arguments)
    assert message in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_object_in_place_of_the_path_is_refused():
    model = torch.nn.Linear(3, 2)
    message = "path: expected a str or a Path, got Linear; objects come after the path, by names"
    with pytest.raises(TypeError, match=f"^save: {message}"):
        checkpoint.save(model, step=1)
    with pytest.raises(TypeError, match=f"^load: {message}"):
        checkpoint.load(model)


# Steps in the first epoch of five batches, at its end, and in the second one.
@pytest.mark.parametrize(
    ("workers", "step"), [(0, 3), (0, 5), (0, 8), pytest.param(2, 8, marks=pytest.mark.slow)]
)
def test_stateful_loader_of_torchdata_goes_on_with_the_next_batch(tmp_path, workers, step):
    """Random numbers go on, too, if they are set after the first iterator was made."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def made():
        torch.manual_seed(0)
        return stateful.StatefulDataLoader(
            list(range(20)), batch_size=4, shuffle=True, num_workers=workers
        )

    def epoch(batches):
        return [(batch.tolist(), torch.rand(()).item()) for batch in batches]

    loader, expected = made(), []
    for _ in range(3):  # of five batches each
        for batch in loader:
            expected += epoch([batch])
            if len(expected) == step:
                checkpoint.save(tmp_path, step=step, loader=loader)
    other = made()
    checkpoint.load(tmp_path, loader=other)
    batches = iter(other)
    checkpoint.load(tmp_path, rng=True)
    found = epoch(batches)
    while len(found) < 15 - step:
        found += epoch(other)
    assert found == expected[step:]
