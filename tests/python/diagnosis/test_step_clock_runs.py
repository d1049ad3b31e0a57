"""Steps of long programs are measured in runs, with pauses in which torch is as it was."""

from contextlib import ExitStack

import ampfuse
import pytest
import torch
from ampfuse.diagnosis import _clock
from ampfuse.diagnosis._clock import StepClock
from clocked import Numbers, Steps, clocked_steps, train
from torch import nn
from torch.utils.data import DataLoader

steps = pytest.fixture(clocked_steps)


def test_long_programs_are_measured_in_runs(steps):
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for _ in range(1500):
        param.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert steps.clock.steps == 1500
    assert steps.numbers[:256] == list(range(1, 257))
    second = steps.numbers[256:]
    assert 256 < second[0] - 256 <= 769
    assert second[:64] == list(range(second[0], second[0] + 64))
    assert 256 + 64 <= len(steps.numbers) <= 1500 - 2 * 256


def replaced_functions():
    return torch.autograd.backward, ampfuse.GradScaler.step, ampfuse.GradScaler.update


@pytest.fixture
def short_runs(monkeypatch):
    """Steps 1 to 10 are measured, then 10 of 20 in turn."""
    for name, value in (("ALWAYS_MEASURED", 10), ("RUN", 10), ("PAUSES", (10, 10))):
        monkeypatch.setattr(_clock, name, value)
    monkeypatch.setattr(_clock, "compiled_graphs", lambda: 0)


def test_functions_of_torch_are_put_back_in_pauses(short_runs):
    before = replaced_functions()
    with ExitStack() as exits:
        made = Steps()
        made.clock = StepClock(exits, made)
        measured = replaced_functions()
        assert not set(before) & set(measured)
        train()
        assert replaced_functions() == before
        train()
        assert not set(before) & set(replaced_functions())
        train()
        assert replaced_functions() == before
    assert made.numbers == [*range(1, 11), *range(21, 31)]
    assert replaced_functions() == before


def test_epochs_are_counted_in_pauses_but_batches_are_not(short_runs, steps):
    loader = DataLoader(Numbers(), 4)
    for _ in range(4):
        train(loader=loader)
    assert steps.numbers == [*range(1, 11), *range(21, 31)]
    (found,) = steps.clock.loaders
    assert len(found.starts) == 4
    assert found.batches == 20


def test_functions_stay_replaced_in_pauses_of_programs_that_compile(short_runs, monkeypatch):
    with ExitStack() as exits:
        made = Steps()
        made.clock = StepClock(exits, made)
        train()
        monkeypatch.setattr(_clock, "compiled_graphs", lambda: 1)
        train()
        train()
        # The first pause began before, so it does not end.
        assert made.numbers == list(range(1, 11))
        made = Steps()
        made.clock = StepClock(exits, made)
        measured = replaced_functions()
        for _ in range(4):
            train()
            assert replaced_functions() == measured
        assert made.numbers == [*range(1, 11), *range(21, 31)]


def test_what_the_program_replaces_stays_in_pauses(short_runs, monkeypatch):
    with ExitStack() as exits:
        made = Steps()
        made.clock = StepClock(exits, made)
        calls, original = [], torch.autograd.backward

        def own(*args, **kwargs):
            calls.append(len(calls))
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "backward", own)
        train()
        assert torch.autograd.backward is own
        for _ in range(2):
            train()
        assert len(calls) == 30
        assert torch.autograd.backward is own
    assert torch.autograd.backward is own
    train()
    assert made.clock._notes == []
