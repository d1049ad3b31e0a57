"""The examples that compare ways to train, run as a user runs them, with few steps."""

import importlib
import os
import sys

import pytest
import warm
from packaging_tools import ROOT

EXAMPLES = ROOT / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MIB = 2**20


def table_of(program, folder, flags):
    """Run a program; return its table as cells by the names of its rows, and all that it prints."""
    picture = folder / "picture.png"
    command = [sys.executable, str(EXAMPLES / program), "--device", "cpu", "--out", str(picture)]
    environment = os.environ | {"COLUMNS": "160"}  # so that no cell takes two lines
    result = warm.run(
        [*command, *flags.split()], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}

    seconds = {name: float(row[0]) for name, row in cells.items()}
    for name, row in cells.items():
        ratio = seconds["float32"] / seconds[name]
        rounding = 0.0006 / seconds["float32"] + 0.0006 / seconds[name]  # of printed seconds
        assert float(row[1]) == pytest.approx(ratio, abs=0.006 + ratio * rounding)
        assert float(row[2]) > 0
    return cells, " ".join(result.stdout.split())


@pytest.mark.slow
def test_image_classifier_learns_in_each_precision(tmp_path):
    flags = "--epochs 2 --images 2048 --seeds 2"
    cells, text = table_of("image_classifier.py", tmp_path, flags)

    assert list(cells) == ["float32", "torch.amp", "ampfuse"]
    for row in cells.values():
        accuracies = [float(part) for part in row[-1].split()]
        assert len(accuracies) == 2
        assert min(accuracies) > 40  # 10 is chance
    assert "The precisions are" in text


@pytest.mark.slow
def test_vit_takes_less_memory_and_larger_batches_in_16_bits(tmp_path):
    cells, text = table_of("vit.py", tmp_path, "--steps 1 --seeds 1 --budget 80MiB")

    assert list(cells) == ["float32", "torch.amp", "ampfuse", "+ bf16 weights"]
    peaks = [float(row[2]) for row in cells.values()]
    assert peaks[-1] < 0.9 * peaks[0]
    batches = [int(row[4]) for row in cells.values()]
    assert batches[0] < batches[1] <= batches[2] < batches[3]
    assert f"grows from {batches[0]} to {batches[3]}, predicted" in text


@pytest.mark.slow
def test_switches_save_most_of_the_memory_and_keep_the_loss(tmp_path):
    flags = "--steps 1 --layers 1 --length 64 --sequences 8 --micro 2"
    cells, text = table_of("seventy_percent.py", tmp_path, flags)

    assert len(cells) == 7
    measured, predicted, losses = (
        [float(row[column]) for row in cells.values()] for column in (2, 4, 5)
    )
    for memory in (measured, predicted):
        assert memory[-1] < 0.6 * memory[0]
    # Autocast adds copies of the weights. Each switch after it saves memory.
    assert predicted[1:] == sorted(predicted[1:], reverse=True)
    assert max(losses) - min(losses) < 0.02
    assert f"{measured[0]:.0f} MiB to {measured[-1]:.0f} MiB" in text
    assert "The loss stays the same" in text


@pytest.mark.parametrize(
    ("seconds", "mebibytes", "device", "sentences"),
    [
        ([2.0, 1.5, 1.0], [400, 300, 200], "cuda", ["is 2.00 times as fast", "50% of"]),
        ([1.0, 3.0, 1.3], [400, 300, 200], "cpu", ["not save time on this cpu", "1.30 times"]),
        ([1.0, 3.0, 1.3], [100, 100, 80], "cpu", ["The memory cannot be compared"]),
        ([1.0, 3.0, 1.3], [100, 99, 101], "cuda", ["saves no memory: torch.amp takes 99%"]),
    ],
)
def test_verdict_follows_the_measurements(monkeypatch, seconds, mebibytes, device, sentences):
    monkeypatch.syspath_prepend(EXAMPLES)
    comparison = importlib.import_module("comparison")
    pairs = zip(("float32", "torch.amp", "ampfuse"), seconds, mebibytes, strict=True)
    results = {name: comparison.Figures([time], peak * MIB) for name, time, peak in pairs}

    text = comparison.verdict(results, device)

    assert all(sentence in text for sentence in sentences)


def test_equal_accuracy_means_that_precisions_differ_no_more_than_seeds(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    classification = importlib.import_module("classification")

    def agreement(*accuracies):
        runs = {str(one): classification.Classified([1.0], 1, one) for one in accuracies}
        return classification.agreement(runs)

    assert "are equally accurate" in agreement([0.90, 0.92, 0.94], [0.91, 0.92, 0.92])
    assert "are not equally accurate" in agreement([0.90, 0.91, 0.92], [0.80, 0.81, 0.82])
