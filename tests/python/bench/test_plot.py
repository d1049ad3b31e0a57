"""The pictures of benchmarks: which cases they show, and that kept numbers can be drawn again."""

from pathlib import Path

import plots
import pytest
from bench_cases import MACHINE
from harness import OURS
from harness.pictures import MOST_CASES, PICTURES, Picture
from harness.plot import chosen, plot
from harness.report import Row, read_rows

RESULTS = Path(plots.__file__).parent / "results"
LABELS = {"norm/1x1K/float32": "one tensor", "norm/2x1K/float32": "two tensors"}
EXAMPLE = Picture("example", LABELS)


def row(shape, provider, median_ms=1.0, peak_mib=None):
    return Row("norm", shape, "float32", 1, provider, "ok", median_ms=median_ms, peak_mib=peak_mib)


def test_cases_have_the_order_and_the_labels_of_their_picture_and_torch_comes_first():
    rows = [
        row(shape, name)
        for shape in ("3x1K", "2x1K", "1x1K")
        for name in ("torch .float()", "torch", OURS)
    ]
    cases = chosen(rows, EXAMPLE)
    assert {label: [own.provider for own in rows] for label, rows in cases.items()} == {
        "one tensor": ["torch", "torch .float()", OURS],
        "two tensors": ["torch", "torch .float()", OURS],
    }


def test_without_a_case_of_the_picture_the_first_cases_are_drawn_by_name():
    rows = [row(f"{count}x1M", "torch") for count in range(2 * MOST_CASES)]
    cases = chosen(rows, EXAMPLE)
    assert [*cases] == [f"norm/{count}x1M/float32" for count in range(MOST_CASES)]


def test_nothing_is_drawn_if_nothing_was_measured(tmp_path):
    assert not plot(tmp_path / "none.png", "example", MACHINE, [row("1x1K", OURS, None)])
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("peak_mib", [None, 8.0])
def test_memory_is_drawn_beside_the_times_if_it_was_measured(tmp_path, peak_mib):
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    rows = [row("1x1K", name, peak_mib=peak_mib) for name in ("torch", OURS)]
    assert plot(tmp_path / "drawn.png", "example", MACHINE, rows)
    _, width, _ = imread(tmp_path / "drawn.png").shape
    assert (width > 1000) == (peak_mib is not None)


def measured_so_far(name):
    """Return the cases of a picture; whole steps were measured in one dtype, on a GPU."""
    if name == "training":
        return {f"step/{model}/bfloat16" for model in ("gpt2-124m", "vit-b-16")}
    return set(PICTURES[name].labels)


@pytest.mark.parametrize("name", [name for name in PICTURES if [*RESULTS.glob(f"*/{name}.csv")]])
def test_each_case_of_a_picture_has_kept_numbers(name):
    measured = {row.case for path in RESULTS.glob(f"*/{name}.csv") for row in read_rows(path)}
    assert measured_so_far(name) <= measured


def test_pictures_are_drawn_again_from_kept_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    kept = tmp_path / "patched_step.csv"
    kept.write_bytes((RESULTS / "amd-epyc" / "patched_step.csv").read_bytes())
    assert plots.main([str(kept)]) == 0
    assert (tmp_path / "patched_step.png").read_bytes().startswith(b"\x89PNG")
