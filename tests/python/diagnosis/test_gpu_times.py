"""The GPU's time for each phase; here the GPU is a stand-in that needs a given time for a phase."""

import pytest
import torch
from ampfuse.tools.diagnosis import gpu_times
from ampfuse.tools.diagnosis.gpu_times import GpuTimes
from ampfuse.tools.diagnosis.phases import BACKWARD, FORWARD, INPUT, OPTIMIZER

PHASES = {INPUT: 1.0, FORWARD: 20.0, BACKWARD: 40.0, OPTIMIZER: 10.0}  # ms of the GPU


class Gpu:
    """A stream whose work is done `delay` ms after the host has given it."""

    def __init__(self):
        self.host = self.given = 0.0
        self.is_capturing = False

    def query(self):
        return self.given <= self.host

    def work(self, milliseconds):
        self.given = max(self.given, self.host) + milliseconds


class Event:
    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.stream, self.time = stream, max(stream.given, stream.host)

    def query(self):
        return self.time <= self.stream.host

    def elapsed_time(self, end):
        return end.time - self.time


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(gpu_times, "uses_gpu", lambda: True)
    monkeypatch.setattr(gpu_times, "is_capturing", lambda: made.is_capturing)
    return made


def train(gpu, host, steps=64):
    """Train with phases that take `host` ms of the host each."""
    times = GpuTimes()
    for step in range(1, steps + 1):
        for phase, milliseconds in PHASES.items():
            gpu.work(milliseconds)
            gpu.host += host
            if times.is_live:
                times.noted(phase, begins=False)
        times.read([(phase, 0.0) for phase in PHASES])
        times.step_ends(None, step, {})
    return times


def test_times_of_a_busy_gpu_are_those_of_its_work(gpu):
    times = train(gpu, host=2.0)
    gpu.host = gpu.given
    # The first event ends the first phase, so it has no beginning.
    assert times.milliseconds() == pytest.approx({FORWARD: 20, BACKWARD: 40, OPTIMIZER: 10})
    assert times.idle() == 0


def test_gpu_that_waits_for_the_host_is_noticed_in_every_eighth_step(gpu):
    times = train(gpu, host=50.0, steps=80)
    assert len(times._steps) == 9  # those after steps 8, 16, …, 72
    assert times.idle() == 1.0
    assert times.milliseconds()[BACKWARD] == pytest.approx(50)


def test_steps_that_the_gpu_has_not_finished_do_not_count(gpu):
    times = train(gpu, host=2.0, steps=9)
    assert times.milliseconds() is None
    gpu.host = gpu.given
    assert times.milliseconds() is not None


def test_captured_steps_are_not_measured(gpu):
    gpu.is_capturing = True
    assert train(gpu, host=50.0).milliseconds() is None


def test_steps_on_several_streams_are_not_measured(gpu, monkeypatch):
    streams = iter([gpu, Gpu()])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: next(streams))
    times = GpuTimes()
    times.is_live = True
    times.noted(FORWARD, begins=True)
    times.noted(FORWARD, begins=False)
    times.read([(FORWARD, 0.0)] * 2)
    times.step_ends(None, 1, {})
    assert times.milliseconds() is None


def test_program_without_gpu_has_no_times():
    times = GpuTimes()
    for step in range(20):
        times.step_ends(None, step, {})
    assert times.milliseconds() is None
    assert times.idle() == 0
