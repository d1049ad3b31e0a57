"""The comparison of builds: what it calls a difference, and a whole run."""

import argparse
from pathlib import Path

import ampfuse
import compare
import pytest
from compare import AGAIN, Key, Times

QUIET, NOISY = (("multi_tensor", "norm", name, "float32", "ampfuse") for name in ("64x1M", "1x1K"))
INSTALLED = Path(ampfuse.__file__).parents[1]


def times_of(**builds: dict[Key, list[float]]) -> Times:
    return {name: dict(cases) for name, cases in builds.items()}


def test_a_difference_is_further_from_1_than_the_first_build_is_from_itself() -> None:
    times = times_of(
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


def test_the_report_names_only_the_cases_that_differ() -> None:
    times = times_of(
        old={QUIET: [1.0], NOISY: [2.0]},
        new={QUIET: [0.5], NOISY: [2.0]},
        again={QUIET: [1.01], NOISY: [2.02]},
    )

    first, *lines = compare.report(compare.compared(times)["new"])

    assert first == "2 cases, median ratio 0.750, 1 beyond the noise"
    case = " ".join(QUIET)
    assert lines == [f"   0.500 faster  1 -> 0.5 ms  {case}  (noise 1.020)"]


def test_a_case_that_one_build_does_not_have_is_left_out() -> None:
    times = times_of(old={QUIET: [1.0]}, new={NOISY: [1.0]}, again={QUIET: [1.0]})

    assert compare.report(compare.compared(times)["new"]) == [
        "nothing was measured with both builds"
    ]


@pytest.mark.parametrize("text", ["folder", "=folder", f"{AGAIN}={INSTALLED}", "new=/"])
def test_a_build_is_a_name_and_a_folder_that_holds_the_package(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected NAME=FOLDER"):
        compare.build(text)


@pytest.mark.slow
def test_a_build_is_compared_with_itself(capsys: pytest.CaptureFixture[str]) -> None:
    builds = [f"{name}={INSTALLED}" for name in ("one", "two")]
    only = ["--quick", "--rounds", "3", "--cases", "step/10x1K/*"]

    compare.main([*builds, "--bench", "grad_scaler", "--runs", "1", "--", *only])

    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == [f"run 1 of 1: grad_scaler, {name}" for name in ("one", "two", AGAIN)]
    assert printed[4] == "two / one:"
    assert printed[5].startswith("1 cases, median ratio ")
