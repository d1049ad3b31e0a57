"""The demonstration, run the way a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

pytestmark = pytest.mark.slow


def run_digits(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DIGITS), "--device", "cpu", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_demo_prints_a_table_of_three_runs_and_draws_their_losses(tmp_path: Path) -> None:
    plot = tmp_path / "losses.png"

    result = run_digits("--epochs", "10", "--out", str(plot))

    assert result.returncode == 0, result.stderr
    for name in ("float32", "torch.amp", "ampfuse"):
        [row] = [line for line in result.stdout.splitlines() if f"│ {name} " in line]
        accuracy = float(row.split("│")[-2].strip().removesuffix("%"))
        assert accuracy >= 95
    assert plot.read_bytes().startswith(PNG_SIGNATURE)


def test_the_demo_fails_when_a_run_has_not_learned(tmp_path: Path) -> None:
    result = run_digits("--epochs", "1", "--out", str(tmp_path / "losses.png"))

    assert result.returncode == 1
    assert "test accuracy under 95%: float32, torch.amp, ampfuse" in result.stderr
