"""The benchmark of the gradient scaler: its byte counts, and the agreement of its providers."""

from pathlib import Path

import bench_grad_scaler
import pytest
from bench_runs import Run, bench_runner
from harness import OURS

PASSES = {"step": 2, "step_clip": 3, "step_clip_below_limit": 2, "step_on_device": 1}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return bench_runner(tmp_path, monkeypatch)


def test_floors_match_a_hand_count() -> None:
    floors = {
        operation.name: bench_grad_scaler.case(operation, "10x64K").traffic.total
        for operation in bench_grad_scaler.OPERATIONS
    }

    assert floors == {name: passes * 10 * 65_536 * 4 for name, passes in PASSES.items()}


@pytest.mark.slow
def test_both_scalers_agree_on_every_operation(run: Run) -> None:
    cases = [
        bench_grad_scaler.case(operation, "10x64K") for operation in bench_grad_scaler.OPERATIONS
    ]

    status, rows = run(cases)

    assert status == 0
    measured = [row["provider"] for row in rows if row["status"] == "ok"]
    assert measured == ["torch", OURS] * len(bench_grad_scaler.OPERATIONS)
