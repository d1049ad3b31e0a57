"""Times builds of ampfuse against each other: is one faster or slower, beyond noise?

    python benchmarks/compare.py before=../old/python after=python
    python benchmarks/compare.py this=build/kit/this base=build/kit/base --bench cross_entropy \\
        --runs 5 -- --device cuda --cases 'train/*/bfloat16'

Each NAME=FOLDER is a build; its folder holds the package `ampfuse`. NAME=FOLDER+VARIANT is the same
build with the environment variable AMPFUSE_VARIANT. This checkout's benchmarks run with each build
in turn, several times. The first build takes two turns per run, as itself and as
"again", so that the difference between these two shows the noise. A case counts as faster or
slower only if its ratio is further from 1 than the noise. What follows `--` is passed on to the
benchmarks, by default --quick. An interrupt ends the runs; what was measured until then is
reported.
"""

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import OURS
from harness.report import read_rows

HERE = Path(__file__).parent
BENCHMARKS = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
AGAIN = "again"

Key = tuple[str, ...]  # benchmark, operation, shape, dtype, provider
Times = dict[str, dict[Key, list[float]]]  # milliseconds by build and case, one for each run


@dataclass(frozen=True)
class Compared:
    """One case of one build, compared with the first build."""

    key: Key
    first: float  # milliseconds, the median of all runs, like `other`
    other: float
    noise: float  # ratios up to this one, and down to its inverse, count as no difference

    @property
    def ratio(self) -> float:
        """The time of this build divided by that of the first."""
        return self.other / self.first

    @property
    def differs(self) -> bool:
        """True if the ratio is further from 1 than the noise."""
        return max(self.ratio, 1 / self.ratio) > self.noise


def times_in(path: Path, benchmark: str) -> Iterator[tuple[Key, float]]:
    """Yield each time of ampfuse in a benchmark's CSV."""
    for row in read_rows(path):
        if row.median_ms is not None and row.provider.startswith(OURS):
            yield (benchmark, row.operation, row.shape, row.dtype, row.provider), row.median_ms


@dataclass(frozen=True)
class Build:
    """A build of ampfuse, perhaps with a variant."""

    folder: Path
    variant: str = ""

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that uses this build."""
        paths = filter(None, [str(self.folder.resolve()), os.environ.get("PYTHONPATH")])
        path = os.pathsep.join(paths)
        return {**os.environ, "PYTHONPATH": path, "AMPFUSE_VARIANT": self.variant}


def run(benchmark: str, build: Build, arguments: Sequence[str]) -> Iterator[tuple[Key, float]]:
    """Run a benchmark with a build, and yield its times."""
    script = HERE / f"bench_{benchmark}.py"
    with tempfile.TemporaryDirectory() as out:
        log = Path(out) / "log"
        with log.open("w") as output:
            status = subprocess.run(
                [sys.executable, script, "--out", out, *arguments],
                env=build.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        if status != 0:
            what = f"{script.name} with {build.folder} failed:"
            print(what, log.read_text()[-2000:], file=sys.stderr)
        found = Path(out) / f"{benchmark}.csv"
        yield from times_in(found, benchmark) if found.exists() else ()


def collect(
    builds: Mapping[str, Build], benchmarks: Sequence[str], runs: int, arguments: Sequence[str]
) -> Times:
    """Run all benchmarks with all builds in turn. Each run begins with the next build."""
    turns = [*builds.items(), (AGAIN, next(iter(builds.values())))]
    times: Times = {name: {} for name, _ in turns}
    try:
        for index in range(runs):
            for benchmark in benchmarks:
                at = index % len(turns)
                for name, build in (*turns[at:], *turns[:at]):
                    for key, milliseconds in run(benchmark, build, arguments):
                        times[name].setdefault(key, []).append(milliseconds)
                    print(f"run {index + 1} of {runs}: {benchmark}, {name}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what follows is what was measured")
    return times


def compared(times: Times) -> dict[str, list[Compared]]:
    """Return the cases of each build except the first, largest ratio first."""
    medians = {
        name: {key: statistics.median(found) for key, found in cases.items()}
        for name, cases in times.items()
    }
    first, *others = (name for name in medians if name != AGAIN)
    twice = {
        key: max(medians[AGAIN][key] / time, time / medians[AGAIN][key])
        for key, time in medians[first].items()
        if key in medians[AGAIN]
    }
    # Two equal builds may agree by chance in one case, so no case has less noise than most.
    usual = statistics.median(twice.values()) if twice else math.inf
    return {
        name: sorted(
            (
                Compared(key, medians[first][key], time, max(usual**2, noise))
                for key, time in medians[name].items()
                if (noise := twice.get(key)) is not None  # measured with the first build, too
            ),
            key=lambda case: -case.ratio,
        )
        for name in others
    }


def report(cases: Iterable[Compared]) -> list[str]:
    """Return the lines about one build: the median ratio, and the cases that differ."""
    cases = list(cases)
    if not cases:
        return ["nothing was measured with both builds"]
    middle = statistics.median(case.ratio for case in cases)
    differing = [case for case in cases if case.differs]
    lines = [f"{len(cases)} cases, median ratio {middle:.3f}, {len(differing)} beyond the noise"]
    for case in differing:
        what = "slower" if case.ratio > 1 else "faster"
        lines.append(
            f"  {case.ratio:6.3f} {what}  {case.first:.4g} -> {case.other:.4g} ms  "
            f"{' '.join(case.key)}  (noise {case.noise:.3f})"
        )
    return lines


def named_build(text: str) -> tuple[str, Build]:
    """Parse NAME=FOLDER or NAME=FOLDER+VARIANT."""
    name, separator, place = text.partition("=")
    folder, _, variant = (place, "", "") if Path(place).is_dir() else place.partition("+")
    if not separator or name in ("", AGAIN) or not (Path(folder) / "ampfuse").is_dir():
        raise argparse.ArgumentTypeError(
            f"expected NAME=FOLDER[+VARIANT] with a folder that holds ampfuse, got {text!r}"
        )
    return name, Build(Path(folder), variant)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare; return 1 if a build is slower than the first in some case, or was not measured."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description="Time builds of ampfuse against each other.")
    parser.add_argument("builds", nargs="+", type=named_build, metavar="NAME=FOLDER")
    parser.add_argument("--bench", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    parser.add_argument("--runs", type=int, default=3)
    chosen = parser.parse_args(given[:at])
    builds = dict(chosen.builds)
    if len(builds) < len(chosen.builds) or len(builds) < 2:
        parser.error("expected at least two builds, with different names")
    times = collect(builds, chosen.bench, chosen.runs, given[at + 1 :] or ["--quick"])
    first, *_ = builds
    slower = False
    for name, cases in compared(times).items():
        print(f"\n{name} / {first}:", *report(cases), sep="\n")
        missing = len(times[first].keys() ^ times[name].keys())
        if missing:
            print(f"{missing} cases were measured with one of these builds alone")
        slower |= missing > 0 or not cases
        slower |= any(case.differs and case.ratio > 1 for case in cases)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
