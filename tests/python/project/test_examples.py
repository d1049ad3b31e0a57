"""The examples that compare ways to train, among them the demo, run as a user runs them."""

import importlib
import json
import os
import sys
from dataclasses import asdict

import pytest
import warm
from packaging_tools import ROOT

EXAMPLES = ROOT / "examples"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
MIB = 2**20
RUNS = ["float32", "torch.amp", "python -m ampfuse", "ampfuse"]  # of the demo


def run(program, flags):
    command = [sys.executable, str(EXAMPLES / program), "--device", "cpu", *flags.split()]
    environment = os.environ | {"COLUMNS": "160"}  # so that no cell of a table takes two lines
    return warm.run(command, capture_output=True, text=True, env=environment)


def table_of(program, folder, flags):
    """Run a program; return its table as cells by the names of its rows, and all that it prints."""
    picture = folder / "picture.png"
    result = run(program, f"--out {picture} {flags}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stderr == ""
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│")]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    return cells, " ".join(result.stdout.split())


def compared(program, folder, flags):
    """Do what `table_of` does, and check what the programs' tables have in common."""
    cells, text = table_of(program, folder, flags)
    seconds = {name: float(row[0]) for name, row in cells.items()}
    for name, row in cells.items():
        ratio = seconds["float32"] / seconds[name]
        rounding = 0.0006 / seconds["float32"] + 0.0006 / seconds[name]  # of printed seconds
        assert float(row[1]) == pytest.approx(ratio, abs=0.006 + ratio * rounding)
        assert float(row[2]) > 0
    return cells, text


@pytest.mark.slow
def test_demo_prints_a_table_of_four_runs_and_plots_them(tmp_path):
    cells, text = table_of("demo.py", tmp_path, "--steps 20 --sequences 1")

    assert list(cells) == RUNS
    losses = [float(row[-1].split("→")[1]) for row in cells.values()]
    assert max(losses) - min(losses) < 0.1
    assert max(losses) < 8  # a new model has 11.5, and 7.40 was measured
    peaks = {name: float(row[2]) for name, row in cells.items()}
    assert peaks["ampfuse"] < peaks["torch.amp"]
    assert "ampfuse trains" in text


@pytest.mark.slow
def test_losses_are_the_same_with_micro_batches_and_recomputed_activations(tmp_path):
    def losses(flags=""):
        report = tmp_path / "report.json"
        options = f"--precision float32 --steps 2 --sequences 2 --width 32 --report {report}"
        done = run("language_model/train_ampfuse.py", f"{options} {flags}")
        assert done.returncode == 0, done.stderr
        return json.loads(report.read_text())["losses"]

    assert losses("--micro-batches 2 --recompute") == pytest.approx(losses(), rel=1e-4)


@pytest.fixture
def demo(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("demo")


def runs(demo, seconds, losses):
    parts = dict.fromkeys(demo.PARTS, MIB)
    pairs = zip(seconds, losses, strict=True)
    every = [demo.Figures([64, 50257], [loss], [1.0], time, parts, parts) for time, loss in pairs]
    return dict(zip(RUNS, every, strict=True))


@pytest.mark.parametrize(
    ("seconds", "slower", "sentences"),
    [
        ([3.0, 2.0, 1.0, 0.5], 0.8, ["4.0 times as fast as torch.amp", "2.0 times as fast"]),
        ([1.0, 9.0, 9.0, 0.9], 80.0, ["multiplies bfloat16 matrices 80 times slower"]),
        ([1.0, 9.0, 9.0, 2.0], 80.0, ["not save time on this machine: ampfuse takes 2.0 times"]),
    ],
)
def test_demo_reports_the_gain_and_its_reason(demo, seconds, slower, sentences):
    text = demo.gain(runs(demo, seconds, [6.0] * 4), "bfloat16", slower)

    assert all(sentence in text for sentence in sentences)
    assert ("times slower than" in text) == (slower > 1)
    assert ("does not save time" in text) == (seconds[3] > seconds[0])


def test_demo_fails_if_a_run_has_not_learned_or_the_losses_differ(
    demo, tmp_path, monkeypatch, capsys
):
    parts = dict.fromkeys(demo.PARTS, 1)
    figures = demo.Figures([64, 50257], [11.0, 10.5], [1.0, 2.0], 1.0, parts, parts)
    monkeypatch.setattr(demo, "run_all", lambda *_: dict.fromkeys(RUNS, asdict(figures)))
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "demo.png")])

    assert demo.main() == 1
    assert f"at the end: {', '.join(RUNS)}" in capsys.readouterr().err
    alike = runs(demo, [1.0] * 4, [6.0, 6.1, 6.1, 6.2])
    assert demo.shortcomings(alike, steps=40) == []
    apart = runs(demo, [1.0] * 4, [6.0, 6.1, 6.1, 7.0])
    assert demo.shortcomings(apart, steps=40) == ["the losses at the end differ by more than 0.3"]


@pytest.mark.slow
@pytest.mark.parametrize("program", ["train_torch.py", "train_ampfuse.py"])
def test_each_program_of_the_demo_runs_alone_in_float16(program):
    flags = "--steps 2 --sequences 1 --width 32 --precision float16"
    result = run(f"language_model/{program}", flags)
    assert result.returncode == 0, result.stderr
    assert "loss 11." in result.stdout


@pytest.mark.slow
def test_error_of_a_failing_program_is_printed(tmp_path):
    result = run("demo.py", f"--sequences 1 --micro-batches 2 --out {tmp_path / 'demo.png'}")
    assert result.returncode != 0
    assert "--sequences: expected a multiple of 2 micro-batches" in result.stderr
    assert "failed: see above" in result.stderr


@pytest.mark.slow
def test_image_classifier_learns_in_each_precision(tmp_path):
    cells, text = compared("image_classifier.py", tmp_path, "--epochs 2 --images 2048 --seeds 2")

    assert list(cells) == ["float32", "torch.amp", "ampfuse"]
    for row in cells.values():
        accuracies = [float(part) for part in row[-1].split()]
        assert len(accuracies) == 2
        assert min(accuracies) > 20  # 10 is chance
    assert "The precisions are" in text


@pytest.mark.slow
def test_vit_takes_less_memory_and_larger_batches_in_16_bits(tmp_path):
    cells, text = compared("vit.py", tmp_path, "--steps 1 --seeds 1 --budget 80MiB")

    assert list(cells) == ["float32", "torch.amp", "ampfuse", "+ bf16 weights"]
    peaks = [float(row[2]) for row in cells.values()]
    assert peaks[-1] < 0.9 * peaks[0]
    batches = [int(row[4]) for row in cells.values()]
    assert batches[0] < batches[1] <= batches[2] < batches[3]
    assert f"grows from {batches[0]} to {batches[3]}, predicted" in text


@pytest.mark.slow
def test_switches_save_most_of_the_memory_and_keep_the_loss(tmp_path):
    flags = "--steps 1 --layers 1 --length 64 --sequences 8 --micro 2"
    cells, text = compared("seventy_percent.py", tmp_path, flags)

    assert len(cells) == 8
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
