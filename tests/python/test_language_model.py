"""The example of a language model, run the way a user runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "language_model.py"

pytestmark = pytest.mark.slow


def run_example(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), "--device", "cpu", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_both_learn_alike() -> None:
    result = run_example("--steps", "40", "--vocabulary", "4000", "--batch", "256")

    assert result.returncode == 0, result.stdout + result.stderr
    rows = {
        name: [cell.strip() for cell in line.split("│")[1:-1]]
        for line in result.stdout.splitlines()
        for name in ("torch", "ampfuse")
        if f"│ {name} " in line
    }
    assert set(rows) == {"torch", "ampfuse"}
    last = [float(cells[-1]) for cells in rows.values()]
    assert max(last) < 5
    assert abs(last[0] - last[1]) < 0.05


def test_what_has_not_learned_is_told() -> None:
    result = run_example("--steps", "1", "--vocabulary", "300")

    assert result.returncode == 1


@pytest.mark.parametrize("flags", [("--steps", "0"), ("--batch", "3")])
def test_wrong_arguments_are_told(flags: tuple[str, str]) -> None:
    result = run_example(*flags)

    assert result.returncode == 2
