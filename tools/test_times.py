"""Prints what a run of the tests spent its time on, from the reports in a build folder.

    python tools/test_times.py                # tables: time by kind and by file, cases by function
    python tools/test_times.py --budget       # one line: time and cases, beside the budget
    python tools/test_times.py --check        # fails if a file takes longer than a minute

`make test` and `make test-frameworks` write the reports: build/reports/*.xml, in JUnit's format.
Times are those of the tests. Two run at a time, so that a run takes about half of their sum.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LONGEST = 60.0  # seconds that the tests of a file may take
# Files that may take longer, and the reason.
SLOW_FILES: dict[str, str] = {}


@dataclass(frozen=True)
class Test:
    """A test that was executed."""

    run: str  # the report's name: python, avx2, ctest, frameworks
    file: str
    function: str
    seconds: float
    processes: int
    compiling: float

    @property
    def kind(self) -> str:
        """The test mainly spends its time on this."""
        if self.run == "frameworks":
            return "with frameworks"
        if self.run == "ctest":
            is_sanitized = self.function.endswith(("_asan", "_tsan"))
            return "kernels under sanitizers" if is_sanitized else "C++"
        if "/install/" in self.file:
            return "installations"
        if self.compiling:
            return "torch.compile"
        return "starts processes" if self.processes else "in the test's process"


def tests_of(report: Path) -> Iterable[Test]:
    """Read the executed tests of a report. Skipped ones are left out."""
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        # ctest's properties are its own: labels, and how a test is started.
        properties = {entry.get("name"): entry.get("value", "0") for entry in case.iter("property")}
        name = case.get("name", "").partition("[")[0]
        file = case.get("classname", "").replace(".", "/") + ".py"
        yield Test(
            report.stem,
            "tests/cpp, tests/cuda_host" if report.stem == "ctest" else file,
            name,
            float(case.get("time", 0)),
            int(properties.get("processes", 0)),
            float(properties.get("compiling", 0)),
        )


def wall_seconds(reports: Iterable[Path]) -> float:
    """Return how long the runs took."""
    suites = (suite for path in reports for suite in ElementTree.parse(path).iter("testsuite"))
    return sum(float(suite.get("time", 0)) for suite in suites)


def table(title: str, rows: Iterable[tuple[str, int, float]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {title} | cases | seconds |", "| --- | ---: | ---: |"]
    return "\n".join(lines + [f"| {name} | {cases} | {time:.0f} |" for name, cases, time in rows])


def by(tests: Iterable[Test], key: str) -> list[tuple[str, int, float]]:
    """Return name, cases and seconds of each group, the longest first."""
    cases: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for test in tests:
        cases[getattr(test, key)] += 1
        seconds[getattr(test, key)] += test.seconds
    return [(name, cases[name], time) for name, time in seconds.most_common()]


def budget() -> tuple[float, int]:
    """Return the minutes and cases that CONTRIBUTING grants to `make test` on a built tree."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    pattern = r"budget of `make test`.*?(\d+) minutes.*?([\d,]+) cases"
    found = re.search(pattern, text, re.DOTALL)
    assert found, "CONTRIBUTING.md: expected the budget of `make test` in minutes and cases"
    return float(found[1]), int(found[2].replace(",", ""))


def main() -> None:
    """Print what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reports", type=Path, default=ROOT / "build" / "reports")
    parser.add_argument("--budget", action="store_true", help="print only one line")
    parser.add_argument("--check", action="store_true", help="fail if a file takes too long")
    arguments = parser.parse_args()
    reports = sorted(arguments.reports.glob("*.xml"))
    tests = [test for report in reports for test in tests_of(report)]
    if not tests:
        sys.exit(f"test_times: no test was executed according to {arguments.reports}")
    files = by(tests, "file")
    if arguments.check:
        slow = [
            f"{name} ({time:.0f} s)"
            for name, _, time in files
            if time > LONGEST and name not in SLOW_FILES
        ]
        if slow:
            sys.exit(
                f"test_times: these files took longer than {LONGEST:.0f} s: {', '.join(slow)}. "
                "Make them faster, or give the reason in SLOW_FILES"
            )
        return
    of_make_test = [path for path in reports if path.stem != "frameworks"]
    if arguments.budget:
        minutes, most = budget()
        cases = sum(test.run != "frameworks" for test in tests)
        print(
            f"make test: {wall_seconds(of_make_test) / 60:.1f} of {minutes:.0f} minutes, "
            f"{cases} of {most} cases"
        )
        return
    print(table("kind", by(tests, "kind")), end="\n\n")
    print(table("run", by(tests, "run")), end="\n\n")
    print(table("file", files[:40]), end="\n\n")
    functions = sorted(by(tests, "function"), key=lambda row: -row[1])
    print(table("function", functions[:25]))


if __name__ == "__main__":
    main()
