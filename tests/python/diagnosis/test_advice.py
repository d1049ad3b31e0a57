"""Hints that follow from the times of a program's steps."""

from types import MappingProxyType

import pytest
import torch
from ampfuse.memory import Suspect
from ampfuse.tools.diagnosis import advice
from ampfuse.tools.diagnosis.advice import (
    explain_gpu,
    explain_habits,
    explain_input,
    explain_lines,
    explain_memory,
)
from ampfuse.tools.diagnosis.gpu_times import GpuTimes
from ampfuse.tools.diagnosis.habits import Habits
from ampfuse.tools.diagnosis.lines import Line
from ampfuse.tools.diagnosis.loaders import Loader
from ampfuse.tools.diagnosis.phases import FORWARD, INPUT, OTHER, PHASES
from ampfuse.tools.program_lines import Place


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    monkeypatch.setattr(advice, "usable_cores", lambda: 8)


def loader(workers, batch=None, *, persistent=False, **values):
    """Return a loader whose batches take so many ms."""
    if batch is not None:
        values |= {"loaded": 1, "loading": batch / 1e3}
    return Loader(workers, persistent, **({"trains": True, "batches": 20} | values))


def hints(loaders=(), lines=(), evaluation=MappingProxyType({}), **milliseconds):
    """Return the hints for 20 steps with these times."""
    times = dict.fromkeys(PHASES, 0.0) | milliseconds
    steps = {"count": 20, "measured": 20, "milliseconds": times, "evaluation": 0.0, "evaluated": 0}
    return list(advice.hints(steps | evaluation, list(loaders), list(lines)))


def line(phase, call="", share=0.5):
    return Line(phase, Place("train.py:3", f"x = {call}()", call), share)


@pytest.mark.parametrize(
    ("made", "wait", "rest", "said"),
    [
        (loader(0, 30), 30.0, 10.0, "DataLoader(num_workers=3) would hide it, or a part of it"),
        (loader(2, 40), 10.0, 10.0, "DataLoader(num_workers=4) would hide it"),
        (loader(2), 10.0, 10.0, "DataLoader(num_workers=4) would hide it"),  # not measured
        (loader(0, 300), 300.0, 10.0, "Make the transforms faster"),
        (loader(4), 30.0, 10.0, "Make the transforms faster"),
        (loader(4, 20), 10.0, 10.0, "2 of 4 workers would do: a larger prefetch_factor"),
    ],
)
def test_number_of_workers_that_hides_the_wait_is_computed(made, wait, rest, said):
    assert said in explain_input(made, 1.0, wait, rest)


def test_a_step_of_several_batches_needs_more_workers():
    assert "num_workers=4)" in explain_input(loader(0, 10), 4.0, 40.0, 10.0)


def test_training_on_a_gpu_leaves_the_cores_to_workers(monkeypatch):
    monkeypatch.setattr(advice, "uses_gpu", lambda: True)
    assert "would hide it." in explain_input(loader(0, 30), 1.0, 30.0, 10.0)


def test_loader_of_training_that_the_program_waits_for_longest_is_meant():
    evaluation = loader(0, 300, waited=9.0, trains=False)
    loaders = [evaluation, loader(1, 50, waited=2.0), loader(0, 1, waited=0.1)]
    (hint,) = hints(loaders, input=30.0, forward=10.0)
    assert "with num_workers=1" in hint
    assert hints([evaluation], input=30.0, forward=10.0) == []


@pytest.mark.parametrize(
    ("wait", "forward", "expected"),
    [(30.0, 10.0, 1), (5.0, 10.0, 1), (0.9, 10.0, 0), (1.5, 1.0, 0), (30.0, 1000.0, 0)],
)
def test_short_waits_are_not_worth_a_hint(wait, forward, expected):
    assert len(hints([loader(0, wait)], input=wait, forward=forward)) == expected


def test_line_that_takes_the_time_of_loading_is_named():
    lines = [line(FORWARD, share=0.5), line(INPUT, "augment", 0.3), line(INPUT, "read", 0.1)]
    (hint,) = hints([loader(0, 30)], lines, input=30.0, forward=10.0)
    assert hint.endswith("75% of the loading is at train.py:3, `x = augment()`.")
    (hint,) = hints([loader(0, 30, loop="train.py:3")], lines, input=30.0, forward=10.0)
    assert "of the loading is at" not in hint  # the loop itself, since torch loads the batches


def test_workers_that_are_started_in_each_epoch_are_noticed():
    slow = {"starts": [1.0, 1.0, 1.0], "late_starts": [1.0, 1.0]}
    (hint,) = hints([loader(2, **slow)], forward=100.0)  # 2 s for 20 steps
    assert "takes 1,000 ms until the first batch, in each of 3 epochs" in hint
    for quiet in (
        loader(2, persistent=True, **slow),
        loader(2, starts=[1.0, 0.01, 0.01], late_starts=[0.01, 0.01]),
        loader(0, **slow),
    ):
        assert hints([quiet], forward=100.0) == []


def test_starts_of_workers_are_no_slow_batches():
    made_again = [loader(2, batches=10, late_starts=[2.0], starts=[2.0]) for _ in range(2)]
    (hint,) = hints(made_again, input=201.0, forward=10.0)  # 4.02 s of waits in 20 steps
    assert hint.startswith("Starting the workers of a DataLoader takes 2,000 ms")
    started, waits = hints(made_again, input=230.0, forward=10.0)
    assert started == hint
    assert waits.startswith("75% of a step (30.0 ms) waits for input")


@pytest.mark.parametrize(("evaluated", "milliseconds", "expected"), [(20, 30, 1), (2, 30, 0)])
def test_evaluation_after_each_step_is_noticed(evaluated, milliseconds, expected):
    evaluation = {"evaluated": evaluated, "evaluation": milliseconds}
    found = hints(forward=10.0, evaluation=evaluation)
    assert ["evaluation, which takes 30.0 ms" in hint for hint in found] == [True] * expected


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (line(OTHER, "item"), "The host waits for the GPU during 50% of the time at train.py:3"),
        (line(OTHER, "cpu"), "The host waits for the GPU"),
        (line(FORWARD, "to"), "waits for copies to the GPU"),
        (line(INPUT, "item"), None),
        (line(OTHER, "item", share=0.05), None),
        (line(OTHER, "print"), None),
    ],
)
def test_lines_that_wait_for_the_gpu_are_named(monkeypatch, found, said):
    monkeypatch.setattr(advice, "uses_gpu", lambda: True)
    hinted = list(explain_lines([found], other=0.0))
    assert len(hinted) == (said is not None)
    assert all(said in hint for hint in hinted)


def test_nothing_waits_for_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(advice, "uses_gpu", lambda: False)
    assert list(explain_lines([line(FORWARD, call) for call in ("to", "item")], other=0.0)) == []


def test_parts_of_one_line_are_added_up():
    parts = [line(OTHER, "save", 0.3), line(OTHER, "save", 0.3)]
    parts[1] = parts[1]._replace(place=parts[1].place._replace(call="zeros"))
    (hint,) = hints([], parts, other=60.0, forward=40.0)
    assert hint.startswith("60% of the time passes outside of forward, backward and optimizer at")


@pytest.mark.parametrize("call", ["clip_grad_norm_", "update"])
def test_lines_that_training_needs_are_not_called_superfluous(call):
    assert hints([], [line(OTHER, call, 0.6)], other=60.0, forward=40.0) == []


def test_limit_of_a_container_counts(monkeypatch):
    monkeypatch.undo()  # of the cores above
    monkeypatch.setattr(advice.os, "sched_getaffinity", lambda _: range(64))
    for text, expected in (("200000 100000", 2), ("50000 100000", 1), ("max 100000", 64)):
        monkeypatch.setattr(advice.Path, "read_text", lambda _, text=text: text)
        assert advice.usable_cores() == expected


@pytest.mark.parametrize(
    ("other", "found", "expected"),
    [
        (30.0, line(OTHER, "save"), 1),
        (1.0, line(OTHER, "save"), 0),
        (30.0, line(FORWARD, "save"), 0),
        (30.0, line(OTHER, "save", share=0.05), 0),
    ],
)
def test_line_outside_of_training_is_named(other, found, expected):
    assert len(hints([], [found], other=other, forward=70.0)) == expected


def test_one_thread_on_many_cores_is_noticed(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (hint,) = explain_habits(Habits(), 10)
    assert "torch uses 1 of 8 cores" in hint
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")  # a launcher has set one thread for each process
    assert list(explain_habits(Habits(), 10)) == []


@pytest.mark.parametrize(("idle", "expected"), [(0.7, 1), (0.2, 0)])
def test_gpu_that_waits_for_the_host_is_noticed(monkeypatch, idle, expected):
    gpu = GpuTimes()
    assert list(explain_gpu(gpu)) == []
    monkeypatch.setattr(gpu, "idle", lambda: idle)
    assert len(list(explain_gpu(gpu))) == expected


class Monitor:
    """Has found these suspects in this many steps."""

    def __init__(self, growth, suspects, steps=40):
        self._growth, self.suspects, self.steps = growth, suspects, steps

    def growth(self):
        return self._growth


TENSOR = Suspect("train.py:3", "in Linear", 2**20)
LIST = Suspect("losses of train.py", "list of 200 elements", 0)


@pytest.mark.parametrize(
    ("monitor", "said"),
    [
        (Monitor(2.0**20, [TENSOR, LIST]), "train.py:3 in Linear: 1,024 KiB a step"),
        (Monitor(2.0**20, [LIST], steps=200), "losses of train.py has become a list of 200"),
        (Monitor(2.0**22, [TENSOR]), "The rest may be freed memory between them"),
        (Monitor(2.0**20, [LIST]), None),  # most programs append to a list
        (Monitor(2.0**20, []), None),
        (Monitor(None, [TENSOR]), None),
    ],
)
def test_growth_is_reported_with_what_holds_the_memory(monitor, said):
    found = list(explain_memory(monitor))
    assert len(found) == (said is not None)
    assert all(said in hint for hint in found)
