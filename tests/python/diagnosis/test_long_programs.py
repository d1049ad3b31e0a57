"""Long programs are measured in runs, with pauses in which torch is as it was."""

import time

import ampfuse
import pytest
import torch
from ampfuse.tools.diagnosis import clock
from ampfuse.tools.diagnosis.phases import FORWARD
from ampfuse.tools.diagnosis.timeline import Timeline
from clocked import Numbers, clocked, train
from torch import nn
from torch.utils.data import DataLoader


def test_long_programs_are_measured_in_runs():
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    with clocked() as steps:
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


MEASURED = [*range(1, 11), *range(21, 31)]


@pytest.fixture
def short_runs(monkeypatch):
    """Let the clock measure steps 1 to 10, then 10 of 20 in turn. A call of train() is 10 steps."""
    for name, value in (("ALWAYS_MEASURED", 10), ("RUN", 10), ("PAUSES", (10, 10))):
        monkeypatch.setattr(clock, name, value)
    monkeypatch.setattr(clock, "compiled_graphs", lambda: 0)


def test_functions_of_torch_are_put_back_in_pauses(short_runs):
    before = replaced_functions()
    with clocked() as steps:
        assert not set(before) & set(replaced_functions())
        train()
        assert replaced_functions() == before
        train()
        assert not set(before) & set(replaced_functions())
        train()
        assert replaced_functions() == before
    assert steps.numbers == MEASURED
    assert replaced_functions() == before


def test_time_of_a_pause_belongs_to_no_step(short_runs):
    with clocked() as steps:
        train()
        train(lambda: time.sleep(0.05))
        train()
    assert steps.numbers == MEASURED
    assert sum(steps.steps[10].values()) < 0.25


def test_epochs_are_counted_in_pauses_but_batches_are_not(short_runs):
    loader = DataLoader(Numbers(), 4)
    with clocked() as steps:
        for _ in range(4):
            train(loader=loader)
        (found,) = steps.clock.loaders
    assert steps.numbers == MEASURED
    assert len(found.starts) == 4
    assert found.batches == 20


def test_functions_stay_replaced_in_pauses_of_programs_that_compile(short_runs, monkeypatch):
    with clocked() as steps:
        train()
        monkeypatch.setattr(clock, "compiled_graphs", lambda: 1)
        train()
        train()
    # The first pause began before, so it does not end.
    assert steps.numbers == list(range(1, 11))
    with clocked() as steps:
        measured = replaced_functions()
        for _ in range(4):
            train()
            assert replaced_functions() == measured
    assert steps.numbers == MEASURED


def test_what_the_program_replaces_stays_in_pauses(short_runs, monkeypatch):
    with clocked() as steps:
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
    assert steps.clock._notes == []


def test_means_leave_out_the_first_steps_and_need_five_others():
    timeline = Timeline()
    for step, seconds in enumerate((9.0, 9.0, 9.0, 0.001, 0.002, 0.003, 0.004, 0.005), 1):
        assert timeline.summary() is None
        timeline.add(step, {FORWARD: seconds})
    summary = timeline.summary()
    assert summary["milliseconds"][FORWARD] == pytest.approx(3.0)
    assert summary["quartiles"] == pytest.approx([2.0, 3.0, 4.0])
    assert summary["timeline"]["step"] == [4, 5, 6, 7, 8]
    assert summary["timeline"][FORWARD] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])


def test_long_timelines_are_means_of_stretches():
    timeline = Timeline()
    count = 10_000
    for step in range(1, count + 1):
        timeline.add(step, {FORWARD: step / 1e3})
    summary = timeline.summary()
    points, steps = summary["timeline"][FORWARD], summary["timeline"]["step"]
    assert 512 <= len(points) < 1024
    assert timeline.stretch == 16
    assert steps[0] == sum(range(4, 20)) / 16
    assert points == pytest.approx(steps)
    assert summary["milliseconds"][FORWARD] == pytest.approx(count / 2, rel=0.01)
