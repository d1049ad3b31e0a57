"""The linear cross-entropy benchmark: its product counts, and the agreement of its providers."""

from pathlib import Path

import ampfuse
import bench_linear_cross_entropy
import pytest
import torch
from bench_linear_cross_entropy import CPU, GPU, LAYERS, OPERATIONS, QUICK
from bench_runs import Run, bench_runner
from harness import OURS, Case, Products
from torch import Tensor

SHAPE = (160, 24, 700)
# Matrix products at the floor: the logits, and the gradients of hidden states and weight.
PRODUCTS = {"train": 3, "train_frozen": 2, "train_none": 3, "loss": 1}


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes seconds
    monkeypatch.setattr(bench_linear_cross_entropy, "ROWS_AT_A_TIME", 64)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return bench_runner(tmp_path, monkeypatch)


def cases() -> list[Case]:
    return [
        bench_linear_cross_entropy.case(operation, SHAPE, dtype)
        for operation in OPERATIONS
        for dtype in operation.dtypes
    ]


def test_floors_match_a_hand_count() -> None:
    for case in cases():
        flops = PRODUCTS[case.operation] * 2 * 160 * 24 * 700
        assert case.traffic == Products(flops, case.dtype)


@pytest.mark.slow
def test_providers_agree_on_every_operation(run: Run) -> None:
    status, rows = run(cases())

    assert status == 0
    assert {row["status"] for row in rows} == {"ok"}
    assert all(float(row["gflop_per_s"]) > 0 and row["peak_mib"] for row in rows)


def test_provider_with_right_loss_but_wrong_gradient_is_reported_as_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(hidden: Tensor, weight: Tensor, target: Tensor, **options: object) -> Tensor:
        loss = right(hidden, weight, target, **options)
        return loss * 1.5 - loss.detach() * 0.5

    right = ampfuse.linear_cross_entropy
    monkeypatch.setattr(ampfuse, "linear_cross_entropy", wrong)

    status, rows = run([case for case in cases() if case.operation == "train"])

    assert status == 1
    ours = {row["status"] for row in rows if row["provider"] == OURS}
    assert ours == {"failed: result 1 differs from the reference's"}


def test_case_ids_are_unique_and_one_case_is_quick() -> None:
    for shapes in (CPU, GPU):
        listed = [
            bench_linear_cross_entropy.case(operation, shape, dtype)
            for operation in OPERATIONS
            for shape in shapes
            for dtype in operation.dtypes
        ]
        assert len({case.id for case in listed}) == len(listed)
        assert sum(case.quick for case in listed) == len(set(QUICK) & set(shapes)) == 1


def test_gpu_cases_use_layers_of_the_models_and_cpu_cases_narrower_ones() -> None:
    assert {shape[1:] for shape in GPU} == set(LAYERS)
    narrow = {(features // 8, classes) for features, classes in LAYERS}
    assert {shape[1:] for shape in CPU} == narrow | {(512, 50257)}
