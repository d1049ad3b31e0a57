"""The optimizer benchmark: its byte counts, and the agreement of its providers."""

from pathlib import Path

import bench_fused_adam
import pytest
import torch
from bench_runs import Run, bench_runner
from harness import OURS

# Bytes per parameter that are read or written: gradient, model, moments, master or remainder.
FLOORS = {
    ("update", torch.float32): 28,
    ("step", torch.float32): 32,
    ("update", torch.bfloat16): 28,
    ("step", torch.bfloat16): 30,
    ("step_remainder", torch.bfloat16): 28,
    ("step_smallest", torch.bfloat16): 20,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return bench_runner(tmp_path, monkeypatch)


def test_floors_match_a_hand_count() -> None:
    counted = {
        (operation.name, operation.dtype): bench_fused_adam.case(operation, "64x1M").traffic.total
        for operation in bench_fused_adam.OPERATIONS
    }

    assert counted == {key: bytes_ * 64 * 2**20 for key, bytes_ in FLOORS.items()}


@pytest.mark.slow
def test_providers_agree_on_every_operation(run: Run) -> None:
    cases = [
        bench_fused_adam.case(operation, "resnet50") for operation in bench_fused_adam.OPERATIONS
    ]

    status, rows = run(cases, "--quick")

    assert status == 0
    measured = [row["provider"] for row in rows if row["status"] == "ok"]
    assert measured == ["torch fused", "torch foreach", OURS] * len(bench_fused_adam.OPERATIONS)
