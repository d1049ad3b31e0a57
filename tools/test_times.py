"""Prints what a run of the tests spent its time on, from the reports in a build folder.

    python tools/test_times.py                # tables: time by kind and by file, cases by function
    python tools/test_times.py --budget       # one line: time and cases, beside the budget
    python tools/test_times.py --check        # fails if a file takes longer than a minute

`make test` and `make test-frameworks` write the reports: build/reports/*.xml, in JUnit's format.
Ninja writes how long it compiled each file: build/.ninja_log. Times are those of the tests and of
the compilers. Two run at a time, so that a run takes about half of their sum.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
# The tests of a file may take this many seconds. On a slow machine they may take this part of all
# tests' time, which is as long where all take 1,000 s.
LONGEST = 60.0
LARGEST_PART = 0.06
# Files that may take longer, and the reason.
SLOW_FILES = {
    "tests/python/install/test_adding_an_operator.py": "compiles an operator for CPUs and GPUs",
    "tests/python/install/test_configure.py": "configures builds anew",
    "tests/python/install/test_packaging.py": "makes a wheel and an editable installation",
    "tests/python/project/test_examples.py": "trains the demo, image classifiers and a ViT",
}


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
        if self.compiling > self.seconds / 2:
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
            f"ctest: {name}" if report.stem == "ctest" else file,
            name,
            float(case.get("time", 0)),
            int(properties.get("processes", 0)),
            float(properties.get("compiling", 0)),
        )


def builds(log: Path) -> list[tuple[str, int, float]]:
    """Return kind, files and seconds of what is in a build folder, compiled or linked last."""
    seconds: dict[str, float] = {}
    for line in log.read_text().splitlines()[1:]:
        start, end, _, file, _ = line.split("\t")
        seconds[file] = (int(end) - int(start)) / 1000
    kinds = {"tests/cuda_host/": "builds: kernels with sanitizers", "tests/": "builds: C++ tests"}
    found: dict[str, list[float]] = {}
    for file, time in seconds.items():
        kind = next((kind for folder, kind in kinds.items() if file.startswith(folder)), None)
        kind = kind or ("builds: CUDA kernels" if ".cu.o" in file else "builds: library for CPUs")
        found.setdefault(kind, []).append(time)
    return [(kind, len(times), sum(times)) for kind, times in found.items()]


def wall_seconds(reports: Iterable[Path]) -> float:
    """Return how long the runs took."""
    suites = (suite for path in reports for suite in ElementTree.parse(path).iter("testsuite"))
    return sum(float(suite.get("time", 0)) for suite in suites)


def table(title: str, rows: Iterable[tuple[str, int, float]], counted: str = "cases") -> str:
    """Return a table in Markdown."""
    lines = [f"| {title} | {counted} | seconds |", "| --- | ---: | ---: |"]
    return "\n".join(lines + [f"| {name} | {cases} | {time:.0f} |" for name, cases, time in rows])


def by(tests: Iterable[Test], key: str) -> list[tuple[str, int, float]]:
    """Return name, cases and seconds of each group, the longest first."""
    groups: dict[str, list[float]] = {}
    for test in tests:
        groups.setdefault(getattr(test, key), []).append(test.seconds)
    found = [(name, len(seconds), sum(seconds)) for name, seconds in groups.items()]
    return sorted(found, key=lambda row: -row[2])


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
        longest = max(LONGEST, LARGEST_PART * sum(test.seconds for test in tests))
        slow = [
            f"{name} ({time:.0f} s)"
            for name, _, time in files
            if time > longest and name not in SLOW_FILES
        ]
        if slow:
            sys.exit(
                f"test_times: these files took longer than {longest:.0f} s: {', '.join(slow)}. "
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
    log = arguments.reports.parent / ".ninja_log"
    kinds = by(tests, "kind") + (builds(log) if log.exists() else [])
    kinds.sort(key=lambda row: -row[2])
    print(table("kind", kinds, "cases or files"), end="\n\n")
    print(table("run", by(tests, "run")), end="\n\n")
    print(table("file", files[:40]), end="\n\n")
    functions = sorted(by(tests, "function"), key=lambda row: -row[1])
    print(table("function", functions[:25]))


if __name__ == "__main__":
    main()
