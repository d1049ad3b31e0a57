"""The cross-entropy benchmark: its byte counts, and the agreement of its providers."""

from pathlib import Path

import ampfuse
import bench_cross_entropy
import pytest
import torch
from bench_cross_entropy import CPU, GPU, OPERATIONS, Batch, Operation
from bench_runs import Run, bench_runner
from harness import OURS, Case, Settings
from torch import Tensor

SHAPE = (64, 1000)
BF16, FP32 = torch.bfloat16, torch.float32

# Passes over the logits: reads and writes at the floor, and reads plus writes of ampfuse.
PASSES = {
    "loss": (1, 0, 1),
    "train": (1, 1, 2),
    "train_smoothing": (1, 1, 2),
    "train_in_place": (1, 1, 2),
    "train_none": (1, 1, 3),
}
# Bytes per logit that torch moves, counted by hand from the tensors that each kernel reads and
# writes: cast, log_softmax, zeros, backward of log_softmax, cast.
TORCH = {
    ("loss", BF16, "torch .float()"): (2 + 4) + (4 + 4),
    ("loss", BF16, "torch"): 2 + 2,
    ("loss", FP32, "torch"): 4 + 4,
    ("train", BF16, "torch .float()"): (2 + 4) + (4 + 4) + 4 + (4 + 4 + 4) + (4 + 2),
    ("train", BF16, "torch"): (2 + 2) + 2 + (2 + 2 + 2),
    ("train", FP32, "torch"): (4 + 4) + 4 + (4 + 4 + 4),
}


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling takes seconds


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return bench_runner(tmp_path, monkeypatch)


def cases(operations: list[Operation] = OPERATIONS) -> list[Case]:
    return [
        bench_cross_entropy.case(operation, SHAPE, dtype)
        for operation in operations
        for dtype in operation.dtypes
    ]


def test_floors_match_a_hand_count() -> None:
    for case in cases():
        read, written, _ = PASSES[case.operation]
        size = 64 * 1000 * case.dtype.itemsize
        assert (case.traffic.read, case.traffic.written) == (read * size, written * size)


@pytest.mark.slow
def test_providers_agree_on_every_operation(run: Run) -> None:
    status, rows = run(cases())

    assert status == 0
    skipped = [row for row in rows if row["status"] != "ok"]
    assert [(row["dtype"], row["provider"]) for row in skipped] == [("float16", "torch")]


def test_moved_bytes_match_a_hand_count() -> None:
    settings = Settings(torch.device("cpu"), False, 3, 1, Path(), "*")
    moved = {
        (case.operation, case.dtype, provider.name): provider.moves
        for case in cases()
        for provider in case.setup(settings)
    }

    assert {key: moved[key] for key in TORCH} == TORCH
    ours = {key: bytes_ for key, bytes_ in moved.items() if key[2] == OURS}
    assert ours == {key: PASSES[key[0]][2] * key[1].itemsize for key in ours}


@pytest.mark.parametrize("factor", [1.05, 0.0])
def test_provider_with_right_loss_but_wrong_gradient_is_reported_as_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, factor: float
) -> None:
    def wrong(logits: Tensor, target: Tensor, **options: object) -> Tensor:
        loss = right(logits, target, **options)
        return loss * factor + loss.detach() * (1 - factor)

    right = ampfuse.cross_entropy
    monkeypatch.setattr(ampfuse, "cross_entropy", wrong)

    status, rows = run(cases([Operation("train")]))

    assert status == 1
    assert [row["status"] for row in rows if row["provider"] == OURS] == [
        "failed: result 1 differs from the reference's"
    ]


def test_restore_puts_back_logits_that_a_run_overwrote() -> None:
    operation = Operation("train_in_place", in_place=True)
    batch = Batch(operation, SHAPE, BF16, torch.device("cpu"))
    criterion = bench_cross_entropy.ampfuse_criterion(batch)

    first = [result.detach().clone() for result in batch.run(criterion)]
    batch.restore()
    again = batch.run(criterion)

    assert all(map(torch.equal, first, again))


def test_case_ids_are_unique_and_six_cases_are_quick() -> None:
    for shapes in (CPU, GPU):
        listed = [
            bench_cross_entropy.case(operation, shape, dtype)
            for operation in OPERATIONS
            for shape in shapes
            for dtype in operation.dtypes
        ]

        assert len({case.id for case in listed}) == len(listed)
        assert sum(case.quick for case in listed) == 6
