"""The comparison of builds: what it calls a difference, and a whole run."""

import argparse
from pathlib import Path

import ampfuse
import compare
import pytest
from bench_cases import MACHINE
from compare import AGAIN
from harness import OURS
from harness.report import Row, csv_file

QUIET, NOISY = (("multi_tensor", "norm", name, "float32", "ampfuse") for name in ("64x1M", "1x1K"))
INSTALLED = Path(ampfuse.__file__).parents[1]


def test_a_difference_is_further_from_1_than_the_first_build_is_from_itself():
    times = dict(
        old={QUIET: [1.0, 9.0, 1.0], NOISY: [1.0]},
        new={QUIET: [1.2, 1.2, 1.2], NOISY: [1.2]},
        again={QUIET: [1.01], NOISY: [1.3]},
    )
    (cases,) = compare.compared(times).values()
    assert {case.key: (case.ratio, case.differs) for case in cases} == {
        QUIET: (1.2, False),  # the noise of most cases is that of this one and of the other
        NOISY: (1.2, False),
    }
    times[AGAIN][NOISY] = [1.02]
    (cases,) = compare.compared(times).values()
    assert [case.differs for case in cases] == [True, True]


def test_the_report_names_only_the_cases_that_differ():
    times = dict(
        old={QUIET: [1.0], NOISY: [2.0]},
        new={QUIET: [0.5], NOISY: [2.0]},
        again={QUIET: [1.01], NOISY: [2.02]},
    )
    first, *lines = compare.report(compare.compared(times)["new"])
    assert first == "2 cases, median ratio 0.750, 1 beyond the noise"
    case = " ".join(QUIET)
    assert lines == [f"   0.500 faster  1 -> 0.5 ms  {case}  (noise 1.020)"]


def test_a_case_that_one_build_does_not_have_is_left_out():
    times = dict(old={QUIET: [1.0]}, new={NOISY: [1.0]}, again={QUIET: [1.0]})
    assert compare.report(compare.compared(times)["new"]) == [
        "nothing was measured with both builds"
    ]


@pytest.mark.parametrize("text", ["folder", "=folder", f"{AGAIN}={INSTALLED}", "new=/"])
def test_a_build_is_a_name_and_a_folder_that_holds_the_package(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=FOLDER"):
        compare.named_build(text)


BENCHMARK = """
import os, shutil, sys
assert sys.argv[1] == "--out" and sys.argv[3:] == ["--rounds", "3"]
build, *_ = os.environ["PYTHONPATH"].split(os.pathsep)
rows = os.environ["AMPFUSE_VARIANT"] or "rows"
shutil.copy(f"{build}/{rows}.csv", f"{sys.argv[2]}/fake.csv")
"""


def test_benchmarks_run_with_each_build_and_variant_in_turn(tmp_path, monkeypatch, capsys):
    """The stand-in for a benchmark finds rows beside each build, and others with a variant."""
    (tmp_path / "bench_fake.py").write_text(BENCHMARK)
    monkeypatch.setattr(compare, "HERE", tmp_path)
    monkeypatch.setattr(compare, "BENCHMARKS", ["fake"])
    for file, milliseconds in (("one/rows", 2.0), ("two/rows", 1.0), ("one/fast", 4.0)):
        (tmp_path / file).with_name("ampfuse").mkdir(parents=True, exist_ok=True)
        with csv_file(tmp_path / f"{file}.csv", MACHINE) as write:
            write([Row("norm", "1x1K", "float32", 1, OURS, "ok", median_ms=milliseconds)])
    builds = [f"one={tmp_path}/one", f"two={tmp_path}/two", f"three={tmp_path}/one+fast"]
    code = compare.main([*builds, "--bench", "fake", "--runs", "2", "--", "--rounds", "3"])
    assert code == 1
    assert capsys.readouterr().out.splitlines() == [
        *(f"run 1 of 2: fake, {name}" for name in ("one", "two", "three", AGAIN)),
        *(f"run 2 of 2: fake, {name}" for name in ("two", "three", AGAIN, "one")),
        "",
        "two / one:",
        "1 cases, median ratio 0.500, 1 beyond the noise",
        "   0.500 faster  2 -> 1 ms  fake norm 1x1K float32 ampfuse  (noise 1.000)",
        "",
        "three / one:",
        "1 cases, median ratio 2.000, 1 beyond the noise",
        "   2.000 slower  2 -> 4 ms  fake norm 1x1K float32 ampfuse  (noise 1.000)",
    ]
