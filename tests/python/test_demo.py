"""The demonstration, run the way a user runs it."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
RUNS = ["float32", "torch.amp", "python -m ampfuse", "ampfuse"]

pytestmark = pytest.mark.slow


def run(program: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / program), "--device", "cpu", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_demo_prints_a_table_of_four_runs_and_draws_them(tmp_path: Path) -> None:
    plot = tmp_path / "demo.png"

    result = run("demo.py", "--steps", "40", "--sequences", "1", "--out", str(plot))

    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    cells = {row[0].strip(): row[1:] for row in rows}
    assert list(cells) == RUNS
    losses = [float(row[-1].split("→")[1]) for row in cells.values()]
    assert max(losses) - min(losses) < 0.1
    peaks = {name: float(row[2]) for name, row in cells.items()}
    assert peaks["ampfuse"] < peaks["torch.amp"]
    assert "ampfuse trains" in result.stdout
    assert plot.read_bytes().startswith(PNG_SIGNATURE)


def test_the_demo_fails_when_a_run_has_not_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    demo = importlib.import_module("demo")
    parts = dict.fromkeys(demo.PARTS, 1)
    figures = demo.Figures([64, 50257], [11.0, 10.5], [1.0, 2.0], 1.0, parts, parts)
    monkeypatch.setattr(demo, "run", lambda command, after_step: figures)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "demo.png")])

    assert demo.main() == 1
    assert f"at the end: {', '.join(RUNS)}" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["train_torch.py", "train_ampfuse.py"])
def test_each_program_runs_alone_and_in_float16(program: str) -> None:
    flags = ("--steps", "3", "--sequences", "1", "--precision", "float16")

    result = run(f"language_model/{program}", *flags)

    assert result.returncode == 0, result.stderr
    assert "loss 11." in result.stdout


def test_what_a_program_prints_when_it_fails_is_seen(tmp_path: Path) -> None:
    result = run("demo.py", "--sequences", "-1", "--out", str(tmp_path / "demo.png"))

    assert result.returncode != 0
    assert "RuntimeError" in result.stderr
    assert "failed: see above" in result.stderr
