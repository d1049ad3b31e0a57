"""The multi-tensor benchmark: its byte counts, its shapes, and the agreement of its providers."""

from pathlib import Path

import bench_multi_tensor
import pytest
import shapes
import torch
from bench_runs import Run, bench_runner
from harness import OURS

PASSES = {"total_norm": 1, "clip": 3, "clip_below_limit": 1, "unscale": 2, "unscale_norm_clip": 3}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return bench_runner(tmp_path, monkeypatch)


@pytest.mark.parametrize(("operation", "passes"), PASSES.items())
def test_multi_tensor_floors_match_a_hand_count(operation: str, passes: int) -> None:
    [chosen] = [op for op in bench_multi_tensor.OPERATIONS if op.name == operation]

    single = bench_multi_tensor.case(chosen, "64x1M", torch.float32)
    half = bench_multi_tensor.case(chosen, "64x1M", torch.bfloat16)

    assert single.traffic.total == passes * 64 * 1_048_576 * 4
    assert half.traffic.total == passes * 64 * 1_048_576 * 2


def test_models_have_their_published_size() -> None:
    sizes = {name: shapes.element_count(make()) for name, make in shapes.MODELS.items()}

    # llama-1b has the shapes of Llama 3.2 1B.
    assert sizes == {"gpt2-124m": 124_439_808, "resnet50": 25_557_032, "llama-1b": 1_235_814_400}


@pytest.mark.slow
def test_providers_agree_on_every_multi_tensor_operation(run: Run) -> None:
    cases = [
        bench_multi_tensor.case(operation, "resnet50", torch.float32)
        for operation in bench_multi_tensor.OPERATIONS
    ]

    status, rows = run(cases, "--quick")

    assert status == 0
    measured = [row["provider"] for row in rows if row["status"] == "ok"]
    assert measured == ["torch foreach", OURS] * len(bench_multi_tensor.OPERATIONS)
