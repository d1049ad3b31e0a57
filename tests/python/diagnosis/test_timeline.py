"""The times of all steps, as means and as the points of a chart."""

import pytest
from ampfuse.diagnosis._phases import FORWARD
from ampfuse.diagnosis._timeline import Timeline


def test_few_steps_have_no_summary():
    timeline = Timeline()
    for step in range(1, 8):
        timeline.add(step, {FORWARD: 0.001})
    assert timeline.summary() is None
    timeline.add(8, {FORWARD: 0.001})
    assert timeline.summary()["timeline"]["step"] == [4, 5, 6, 7, 8]


def test_first_steps_are_left_out_of_the_mean():
    timeline = Timeline()
    for step, seconds in enumerate((9.0, 9.0, 9.0, 0.001, 0.002, 0.003, 0.004, 0.005), 1):
        timeline.add(step, {FORWARD: seconds})
    summary = timeline.summary()
    assert summary["milliseconds"][FORWARD] == pytest.approx(3.0)
    assert summary["quartiles"] == pytest.approx([2.0, 3.0, 4.0])
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
