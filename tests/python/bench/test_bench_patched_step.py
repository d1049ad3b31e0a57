"""The benchmark of a patched step: its byte count, and the agreement of its providers."""

from pathlib import Path

import ampfuse
import bench_patched_step
import pytest
import torch
from bench_runs import Run, bench_runner
from harness import OURS


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return bench_runner(tmp_path, monkeypatch)


def test_floor_matches_a_hand_count() -> None:
    floor = bench_patched_step.case("100x1K").traffic.total

    assert floor == (8 + 8 + 28) * 100 * 1024


def test_program_uses_ampfuse_classes_only_while_patched() -> None:
    start = [torch.ones(3)]

    kinds = []
    for patched in (False, True):
        with ampfuse.patched() if patched else torch.no_grad():
            program = bench_patched_step.Program(start)
            kinds.append((program.optimizer, program.scaler))

    plain, ours = kinds
    assert list(map(type, plain)) == [torch.optim.AdamW, torch.amp.GradScaler]
    assert all(map(isinstance, ours, (ampfuse.AdamW, ampfuse.GradScaler)))


@pytest.mark.slow
def test_patched_and_unpatched_steps_agree(run: Run) -> None:
    try:
        status, rows = run([bench_patched_step.case("100x1K")])
    finally:
        ampfuse.unpatch()

    assert status == 0
    measured = [row["provider"] for row in rows if row["status"] == "ok"]
    assert measured == ["torch", "torch fused=True", OURS]
