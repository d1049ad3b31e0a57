"""`python -m ampfuse --plot`: charts of steps, memory and loss scale."""

import pytest
from ampfuse.tools.command import charts
from matplotlib.figure import Figure

PHASES = ("input", "forward", "backward", "optimizer", "scaler", "other")


@pytest.fixture
def report():
    timeline = {phase: [1.0, 2.0, 3.0] for phase in PHASES}
    return {
        "ampfuse": "1.0",
        "program": "train.py",
        "steps": {
            "milliseconds": dict.fromkeys(PHASES, 2.0),
            "timeline": {"step": [4, 5, 6], **timeline},
        },
        "memory": {"step": [1, 2], "host": [2**20, 2**21], "gpu": [0, 0]},
        "scalers": [{"updates": 4, "history": [[4.0, False, 1.0], [4.0, True, 1.0], [2.0] * 3]}],
    }


def test_scale_and_skipped_steps_are_drawn(report):
    axes = Figure().subplots()
    report["scalers"][0]["history"][2] = [2.0, False, 1.0]
    charts.draw_scale(report["scalers"][0], axes)
    scale, skipped = axes.lines
    assert (list(scale.get_xdata()), list(scale.get_ydata())) == ([2, 3, 4], [4.0, 4.0, 2.0])
    assert (list(skipped.get_xdata()), list(skipped.get_ydata())) == ([3], [4.0])


def test_scale_of_zero_and_phases_of_no_time_are_drawn(report, tmp_path):
    report["scalers"][0]["history"] = [[0.0, True, None]]
    report["steps"]["timeline"] = {"step": [4], **{phase: [0.0] for phase in PHASES}}
    charts.plot(report, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("missing", [["steps"], ["memory"], ["steps", "memory"]])
def test_short_programs_have_charts_of_what_is_known(report, missing, tmp_path):
    for name in missing:
        report[name] = None
    charts.plot(report, tmp_path / "report.svg")
    assert "Loss scale" in (tmp_path / "report.svg").read_text()
    report["scalers"] = []
    report["steps"] = report["memory"] = None
    with pytest.raises(ValueError, match="too few steps"):
        charts.plot(report, tmp_path / "nothing.png")


@pytest.mark.parametrize(
    ("times", "top"), [([1.0] * 99 + [100.0], 3.15), ([1.0, 2.0], 2.1), ([0.0], 1.0)]
)
def test_rare_spikes_do_not_flatten_a_chart(report, times, top):
    report["steps"]["timeline"] = {"step": list(range(len(times))), "forward": times}
    axes = Figure().subplots()
    charts.draw_steps(report["steps"], axes)
    assert axes.get_ylim()[1] == pytest.approx(top)
