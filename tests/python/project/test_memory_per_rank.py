"""The comparison of distributed trainings, run as a user runs it, on two ranks of the CPU."""

import argparse
import json
import re
import subprocess
import sys

import memory_per_rank
import pytest
import warm
from memory_per_rank import ALONE, Figures, Memory, figures
from packaging_tools import run_python

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
STRATEGIES = [ALONE, "DDP", "DDP + ZeRO", "FSDP2", "tensor parallel", "pipeline"]
# The matrices are so large that malloc takes new memory for them, which the peak shows.
LAYERS, WIDTH, STEPS = 2, 256, 3
PARAMS = 6 * LAYERS + 3  # tensors; each has a step count of 4 bytes in the state
NORMS = (2 * LAYERS + 1) * WIDTH * 4  # bytes of the weights that tensor parallelism does not shard
LARGEST = 4 * WIDTH * WIDTH * 4  # bytes of a matrix of the perceptron


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Return the figures of all strategies, the printed text, and the path of the picture."""
    folder = tmp_path_factory.mktemp("memory")
    picture, result = folder / "memory.png", folder / "memory.json"
    flags = ("--layers", str(LAYERS), "--width", str(WIDTH), "--steps", str(STEPS))
    command = (memory_per_rank.__file__, *flags, "--out", picture, "--result", result)
    printed = run_python(*command, cwd=folder, CUDA_VISIBLE_DEVICES="")
    results = json.loads(result.read_text())
    return {name: figures(read) for name, read in results.items()}, printed, picture


@pytest.mark.slow
def test_table_has_a_row_for_each_strategy_and_the_picture_exists(ran):
    results, printed, picture = ran
    rows = [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines()]
    cells = {row[0]: row[1:] for row in rows if len(row) == 8}

    assert list(results) == STRATEGIES
    assert list(cells) == ["strategy", *STRATEGIES]
    heads = "weights, gradients, state, peak, × one, s/step, loss"
    assert ", ".join(cells.pop("strategy")) == heads
    for name, row in cells.items():
        assert float(row[0]) == pytest.approx(results[name].largest.weights / 2**20, abs=0.06)
        assert float(row[-1]) == pytest.approx(results[name].losses[-1], abs=1e-4)
    assert "needs the least memory" in printed
    assert "offload is left out" in printed
    assert picture.read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.slow
def test_losses_of_all_strategies_are_those_of_one_process(ran):
    results, _, _ = ran
    for each in results.values():
        assert each.losses == pytest.approx(results[ALONE].losses, rel=1e-5)
    assert len(results[ALONE].losses) == STEPS


@pytest.mark.slow
def test_bytes_of_a_rank_are_the_shards_that_the_strategy_leaves_it(ran):
    results, _, _ = ran
    (alone,) = results[ALONE].ranks
    counts = 4 * PARAMS
    assert alone.gradients == alone.weights
    assert alone.state == 2 * alone.weights + counts
    assert len(results["DDP"].ranks) == 2

    for rank in results["DDP"].ranks:
        assert (rank.weights, rank.gradients, rank.state) == (
            *(alone.weights, alone.gradients, alone.state),
        )
    for rank in results["DDP + ZeRO"].ranks:  # each parameter belongs to one rank
        assert (rank.weights, rank.gradients) == (alone.weights, alone.gradients)
        assert abs(rank.state - alone.state / 2) <= 2 * LARGEST
    for rank in results["FSDP2"].ranks:
        assert rank.weights == rank.gradients == alone.weights / 2
        assert rank.state == 2 * rank.weights + counts
    for rank in results["tensor parallel"].ranks:
        assert rank.weights == rank.gradients == (alone.weights + NORMS) / 2
        assert rank.state == 2 * rank.weights + counts
    for name in ("DDP + ZeRO", "pipeline"):
        assert sum(rank.state for rank in results[name].ranks) == alone.state
    for rank in results["pipeline"].ranks:
        assert rank.weights == rank.gradients
        assert abs(rank.weights - alone.weights / 2) <= WIDTH * 4  # the last norm
    for each in results.values():
        for rank in each.ranks:
            assert rank.peak > rank.weights + rank.gradients + rank.state


@pytest.mark.slow
def test_offload_trains_like_one_process(ran, monkeypatch):
    monkeypatch.setattr(subprocess, "run", warm.run)
    results, _, _ = ran
    options = argparse.Namespace(
        ranks=2, layers=LAYERS, width=WIDTH, steps=STEPS, weights="float32"
    )

    offloaded = memory_per_rank.run("FSDP2 + offload", options, on_gpu=False)

    assert offloaded.losses == pytest.approx(results[ALONE].losses, rel=1e-5)


@pytest.mark.parametrize(("loss", "status"), [(2.0001, 0), (2.001, 1)])
def test_program_fails_if_the_losses_differ(loss, status, tmp_path, monkeypatch, capsys):
    def run(name, options, on_gpu):
        memory = Memory(2**20, 2**20, 2**21, 2**24 if name == ALONE else 2**23, seconds=1.0)
        return Figures([memory], [3.0, loss if name == "FSDP2" else 2.0])

    monkeypatch.setattr(memory_per_rank, "run", run)
    monkeypatch.setattr(sys, "argv", ["memory_per_rank.py", "--out", str(tmp_path / "a.png")])

    assert memory_per_rank.main() == status
    printed = capsys.readouterr()
    assert "DDP needs the least memory: 8.0 MiB per rank, 50% less" in printed.out
    assert ("differ by more than 0.0001" in printed.err) == (status == 1)


@pytest.mark.slow
def test_error_of_a_failing_rank_is_printed(monkeypatch):
    monkeypatch.setattr(subprocess, "run", warm.run)
    options = argparse.Namespace(ranks=2, layers=2, width=64, steps=2, weights="int8")

    with pytest.raises(SystemExit, match="invalid choice: 'int8'") as error:
        memory_per_rank.run(ALONE, options, on_gpu=False)

    assert "one process failed: see above" in str(error.value)
