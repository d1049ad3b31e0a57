"""The optimizer benchmark: its byte counts, and that its providers agree."""

from pathlib import Path

import bench_fused_adam
import pytest
import torch
from bench_runs import Run, bench_runner
from harness import OURS

# Of gradient and model, of moments, of what is kept of a master; bytes per parameter.
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


def test_floors_are_those_of_a_hand_count() -> None:
    counted = {
        (operation.name, operation.dtype): bench_fused_adam.case(operation, "64x1M").traffic.total
        for operation in bench_fused_adam.OPERATIONS
    }

    assert counted == {key: bytes_ * 64 * 2**20 for key, bytes_ in FLOORS.items()}


@pytest.mark.slow
def test_every_operation_agrees_between_its_providers(run: Run) -> None:
    cases = [
        bench_fused_adam.case(operation, "resnet50") for operation in bench_fused_adam.OPERATIONS
    ]

    status, rows = run(cases, "--quick")

    assert status == 0
    measured = [row["provider"] for row in rows if row["status"] == "ok"]
    assert measured == ["torch fused", "torch foreach", OURS] * len(bench_fused_adam.OPERATIONS)
