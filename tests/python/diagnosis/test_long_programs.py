"""Only the first steps of a long program are measured."""

import ampfuse
import pytest
import torch
from ampfuse.tools.diagnosis import clock
from ampfuse.tools.diagnosis.diagnosis import Diagnosis
from ampfuse.tools.diagnosis.phases import FORWARD
from clocked import Numbers, clocked, train
from torch import nn
from torch.utils.data import DataLoader


def replaced_functions():
    return torch.autograd.backward, ampfuse.GradScaler.step, ampfuse.GradScaler.update


@pytest.fixture
def ten_steps(monkeypatch):
    """Let the clock measure ten steps, which is one call of train()."""
    monkeypatch.setattr(clock, "MEASURED", 10)


def test_later_steps_of_a_long_program_are_only_counted():
    param = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    with clocked() as steps:
        for _ in range(300):
            param.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert steps.clock.steps == 300
    assert steps.numbers == list(range(1, 257))


def test_loaders_are_measured_as_long_as_steps(ten_steps):
    iterate, loader = DataLoader.__iter__, DataLoader(Numbers(), 4)
    with clocked() as steps:
        train(loader=loader)
        assert DataLoader.__iter__ is iterate
        train(loader=loader)
        (found,) = steps.clock.loaders
    assert steps.clock.steps == 20
    assert len(found.starts) == 1
    assert found.batches == 10


def test_functions_stay_replaced_since_compiled_code_may_contain_them(ten_steps):
    before = replaced_functions()
    with clocked():
        measured = replaced_functions()
        train()
        train()
        assert replaced_functions() == measured
        assert not set(before) & set(measured)
    assert replaced_functions() == before


def test_what_the_program_replaces_stays(ten_steps, monkeypatch):
    with clocked() as steps:
        calls, original = [], torch.autograd.backward

        def own(*args, **kwargs):
            calls.append(len(calls))
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "backward", own)
        train()
        train()
        assert len(calls) == 20
        assert torch.autograd.backward is own
    assert torch.autograd.backward is own
    train()
    assert steps.clock._notes == []


def test_memory_is_sampled_in_all_steps_but_lines_only_in_those_that_are_measured(ten_steps):
    diagnosis = Diagnosis(print)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    for step in range(1, 12):
        diagnosis.step_ends(optimizer, step, {FORWARD: 1.0} if step < 11 else {})
    diagnosis.stop()
    assert diagnosis.monitor.steps == 11
    assert diagnosis.lines._ended.is_set()
    assert diagnosis.steps()["measured"] == 10


def test_means_leave_out_the_first_steps_and_need_five_others():
    diagnosis = Diagnosis(print)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))])
    for step, seconds in enumerate((9.0, 9.0, 9.0, 0.001, 0.002, 0.003, 0.004, 0.005), 1):
        assert diagnosis.steps() is None
        diagnosis.step_ends(optimizer, step, {FORWARD: seconds})
    diagnosis.stop()
    summary = diagnosis.steps()
    assert summary["milliseconds"][FORWARD] == pytest.approx(3.0)
    assert summary["median"] == pytest.approx(3.0)
    assert summary["spread"]["a step"] == pytest.approx([1.2, 4.0])
    assert summary["timeline"]["step"] == [4, 5, 6, 7, 8]
    assert summary["timeline"][FORWARD] == pytest.approx([1.0, 2.0, 3.0, 4.0, 5.0])
