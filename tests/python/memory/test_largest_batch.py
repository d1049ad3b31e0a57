"""`ampfuse.memory.largest_batch`: a prediction, and at most two trials."""

import ampfuse
import pytest
import torch
from ampfuse.memory import BatchSize, account, largest_batch
from ampfuse.tools.memory.batch import search
from on_ranks import played  # noqa: F401
from processes import Scenarios
from torch import nn

MIB = 2**20

scenario = Scenarios()


@scenario(64)
def same_on_all_ranks(memory):
    group = torch.distributed.group.WORLD
    room = (memory + 64 * torch.distributed.get_rank()) * MIB
    model, optimizer, step = model_and_step()
    own = largest_batch(model, optimizer, step, memory=room).largest
    agreed = largest_batch(model, optimizer, step, memory=room, process_group=group).largest
    return {"own": own, "agreed": agreed}


@pytest.mark.slow
def test_all_ranks_get_the_batch_that_fits_on_each_of_them():
    first, second = scenario.results("same_on_all_ranks", 64)
    assert second["own"] > 1.5 * first["own"]
    assert first["agreed"] == second["agreed"] == first["own"]


class Steps:
    """Measured steps: a peak of `fixed + per_sample * batch` bytes, and a limit."""

    def __init__(self, fixed, per_sample, limit, extra=lambda batch: 0):
        self.peak = lambda batch: int(fixed + per_sample * batch + extra(batch))
        self.limit = limit
        self.tried = []

    def __call__(self, batch):
        self.tried.append(batch)
        peak = self.peak(batch)
        return None if peak > self.limit else peak

    def best(self, room):
        return max(n for n in range(1, 2000) if self.peak(n) <= room)


def trials(steps):
    """Return the batches that were tried after those that were doubled."""
    doubled = next(i for i, n in enumerate([*steps.tried, -1]) if n != 2**i)
    return steps.tried[doubled:]


def test_linear_memory_is_predicted_at_once():
    steps = Steps(1000 * MIB, 37 * MIB, limit=24_000 * MIB)
    best = (24_000 - 1000) // 37
    assert search(steps, steps.limit, trials=2) == best
    assert trials(steps) == [best, best + 1]


@pytest.mark.parametrize("part", [0.95, 1.0])  # of the limit that is to be used
@pytest.mark.parametrize("bend", [-5, -1, 1, 5])
def test_bent_memory_takes_at_most_two_trials(bend, part):
    steps = Steps(1000 * MIB, 37 * MIB, 24_000 * MIB, extra=lambda n: bend * MIB * max(n - 200, 0))
    room = int(part * steps.limit)
    found, best = search(steps, room, trials=2), steps.best(room)
    assert len(trials(steps)) <= 2
    assert 0.9 * best <= found <= best


def test_peak_of_a_large_model_does_not_grow_with_small_batches():
    steps = Steps(0, 0, 24_000 * MIB, extra=lambda n: max(9_000, 6_000 + 37 * n) * MIB)
    assert search(steps, steps.limit, trials=2) == (24_000 - 6_000) // 37
    assert len(trials(steps)) <= 2


def test_memory_that_jumps_ends_with_a_batch_that_fits():
    steps = Steps(0, MIB, 100 * MIB, extra=lambda n: 90 * MIB if n > 16 else 0)
    found = search(steps, steps.limit, trials=2)
    assert steps.peak(found) <= steps.limit
    assert len(trials(steps)) <= 2


@pytest.mark.parametrize("trials", [2, 2**20])
def test_small_memory_is_searched_sample_by_sample(trials):
    for room, found in ((5, 0), (15, 1), (25, 2), (35, 3), (95, 9)):
        assert search(Steps(0, 10 * MIB, room * MIB), room * MIB, trials) == found


@pytest.mark.parametrize("bend", [-5, 0, 5, 300])
def test_search_without_a_limit_of_trials_finds_the_best_batch(bend):
    steps = Steps(
        1000 * MIB, 37.3 * MIB, 1e15, extra=lambda n: bend * MIB * max(n - 50, 0) + 512 * (n % 7)
    )
    assert search(steps, 24_000 * MIB) == steps.best(24_000 * MIB)
    assert len(steps.tried) < 30


@pytest.mark.parametrize("trials", [2, 2**20])
def test_memory_that_does_not_depend_on_the_batch_ends_the_search(trials):
    assert search(Steps(10 * MIB, 0, 100 * MIB), 100 * MIB, trials) >= 2**20


@pytest.mark.parametrize("most", [1, 100, 128])
def test_batch_is_never_larger_than_the_data(most):
    steps = Steps(0, MIB, 1000 * MIB)
    assert search(steps, steps.limit, most=most) == max(steps.tried) == most


def test_guess_is_never_larger_than_the_data():
    steps = Steps(600 * MIB, MIB, 1000 * MIB)
    assert search(steps, steps.limit, peaks={8: steps.peak(8)}, most=300) == 300
    assert max(steps.tried) == 300


def model_and_step():
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 64))
    optimizer = ampfuse.AdamW(model.parameters())

    def step(batch):
        model(torch.zeros(batch, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def test_account_of_the_largest_batch_fits_and_that_of_one_more_does_not():
    model, optimizer, step = model_and_step()
    largest = largest_batch(model, optimizer, step, memory=64 * MIB).largest
    peaks = [account(model, optimizer, lambda n=n: step(n)).peak for n in (largest, largest + 1)]
    assert peaks[0] <= 64 * MIB < peaks[1]
    assert not optimizer.state


def test_effective_batch_is_divided_into_as_few_parts_as_fit():
    largest = largest_batch(*model_and_step(), memory=64 * MIB).largest
    for effective in (16, 8191, 3 * largest):
        found = largest_batch(*model_and_step(), memory=64 * MIB, effective=effective)
        batch, parts = found.batch, found.accumulation
        assert batch * (parts - 1) < effective <= batch * parts
        assert (parts - 1) * largest < effective
        assert batch <= largest == found.largest
        if effective == 16:
            assert found == BatchSize(largest, 16, 1)


def test_arguments_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="memory: expected bytes, since the model is on the CPU"):
        largest_batch(*model_and_step())
    with pytest.raises(ValueError, match="effective: expected at least 1, got 0"):
        largest_batch(*model_and_step(), memory=64 * MIB, effective=0)
    model, optimizer, step = model_and_step()
    with pytest.raises(ValueError, match="memory that grows with the batch, but 1,048,576 samples"):
        largest_batch(model, optimizer, lambda _: step(4), memory=64 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="a step with one sample does not fit"):
        largest_batch(model, optimizer, step, memory=MIB)
    for other in (nn.Tanh(), 3):
        with pytest.raises(ValueError, match="model: expected a module with parameters, got"):
            largest_batch(other, None, lambda batch: None, memory=2**20)
