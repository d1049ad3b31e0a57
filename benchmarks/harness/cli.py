"""The command line that all benchmarks share, and the loop over the cases."""

import argparse
import gc
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from harness.case import Case, CeilingKind, Ceilings, Products, Settings
from harness.console import Progress, progress, show_table
from harness.machine import (
    Machine,
    available_bytes,
    describe,
    device_name,
    measure_ceilings,
    slug,
)
from harness.measure import first_line, measure
from harness.plot import plot
from harness.report import EVERY_PROVIDER, Row, csv_file, rows_of, unmeasured

OUT = Path(__file__).parents[2] / "build" / "bench"
ROUNDS = {"cpu": 21, "cuda": 81}  # a round on a GPU takes only milliseconds
INTERRUPTED = "skipped: interrupted"
GIB = 2**30


def parse(name: str, arguments: Sequence[str] | None) -> Settings:
    parser = argparse.ArgumentParser(prog=f"bench_{name}.py")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="the GPU when there is one")
    parser.add_argument("--quick", action="store_true", help="fewer cases and fewer rounds")
    parser.add_argument("--out", type=Path, help="folder for CSV and PNG; default: build/bench")
    parser.add_argument("--threads", type=int, help="CPU threads; torch's choice when left out")
    parser.add_argument("--rounds", type=int, help="timed runs of each provider")
    parser.add_argument("--cases", default="*", help="glob over operation/shape/dtype")
    given = parser.parse_args(arguments)
    if given.threads is not None and given.threads < 1:
        parser.error(f"--threads: at least 1, got {given.threads}")
    device = torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device: torch sees no GPU")
    usual = ROUNDS[device.type] // (4 if given.quick else 1)
    rounds = usual if given.rounds is None else given.rounds
    if rounds < 3:
        parser.error(f"--rounds: at least 3 for quartiles, got {rounds}")
    threads = given.threads or torch.get_num_threads()
    out = given.out or OUT / slug(device_name(device))
    return Settings(device, given.quick, rounds, threads, out, given.cases)


def select(cases: Sequence[Case], settings: Settings) -> tuple[list[Case], list[Case]]:
    """Return the cases to run, and the matching cases that `--quick` leaves out."""
    matching = [case for case in cases if fnmatchcase(case.id, settings.pattern)]
    if not settings.quick:
        return matching, []
    return [case for case in matching if case.quick], [case for case in matching if not case.quick]


def run_case(case: Case, settings: Settings, ceilings: Ceilings, bar: Progress) -> list[Row]:
    """Run one case and return its rows. A case that is too large or fails has a row, too."""
    # Compiled code of the last case would keep its tensors, and make this case a recompilation.
    torch._dynamo.reset()
    gc.collect()
    available = available_bytes(settings.device)
    if case.memory > available:
        need = f"needs {case.memory / GIB:.1f} GiB, {available / GIB:.1f} GiB available"
        return [unmeasured(case, EVERY_PROVIDER, f"skipped: {need}")]
    try:
        providers = case.setup(settings)
        result = measure(
            providers,
            settings.device,
            settings.rounds,
            bar.advance,
            bar.stage,
            weighs_memory=case.weighs_memory,
        )
    except Exception as error:
        return [unmeasured(case, EVERY_PROVIDER, f"failed: {first_line(error)}")]
    return rows_of(case, providers, result, ceilings)


def run_cases(
    name: str, cases: Sequence[Case], settings: Settings, machine: Machine, ceilings: Ceilings
) -> list[Row]:
    """Run all cases and return their rows. The rows of each case are written to the CSV at once.

    An interrupt ends the run; the cases that are lost have rows that report this.
    """
    rows: list[Row] = []
    done = 0
    with (
        csv_file(settings.out / f"{name}.csv", machine) as write,
        progress(len(cases), settings.rounds) as bar,
    ):
        try:
            for case in cases:
                bar.case(case.id)
                added = run_case(case, settings, ceilings, bar)
                write(added)
                rows += added
                done += 1
        except KeyboardInterrupt:
            lost = [unmeasured(case, EVERY_PROVIDER, INTERRUPTED) for case in cases[done:]]
            write(lost)
            rows += lost
    return rows


def ceiling_text(kind: CeilingKind | torch.dtype, rate: float) -> str:
    if isinstance(kind, torch.dtype):
        return f"{str(kind).removeprefix('torch.')} product {rate:.0f} GFLOP/s"
    return f"{kind} {rate:.1f} GB/s"


def main(name: str, cases: Sequence[Case], arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0 if every provider of every case ran or was skipped for a reason.

    Return 2 if no case matches.
    """
    settings = parse(name, arguments)
    torch.set_num_threads(settings.threads)
    chosen, left_out = select(cases, settings)
    if not chosen:
        names = [case.id for case in (left_out or cases)]
        print(f"--cases {settings.pattern!r} leaves none to run of:", *names, sep="\n  ")
        return 2
    settings.out.mkdir(parents=True, exist_ok=True)

    products = {c.traffic.against for c in chosen if isinstance(c.traffic, Products)}
    ceilings = measure_ceilings(settings.device, sorted(products, key=str))
    machine = describe(settings.device)  # after the ceilings, to read the clocks of a warm device
    print(f"{machine.name}, torch {machine.torch}, ampfuse {machine.ampfuse}; measured ceilings:")
    print(", ".join(ceiling_text(kind, rate) for kind, rate in ceilings.items()), flush=True)

    rows = run_cases(name, chosen, settings, machine, ceilings)
    how = f"medians of {settings.rounds} rounds, caches cold; ceiling: share of it reached"
    show_table(f"{name}: {how}; ampfuse: time over its time", rows)
    if left_out:
        shapes = dict.fromkeys(f"{case.shape}/{case.dtype_name}" for case in left_out)
        print(f"--quick left out {len(left_out)} cases:", ", ".join(shapes))
    drawn = plot(settings.out / f"{name}.png", name, machine, rows)
    print(f"wrote {settings.out / name}.csv", "and .png" if drawn else "")
    if not drawn:
        print("no plot: nothing was measured, or matplotlib is not installed")
    return int(any(row.status.startswith("failed") or row.status == INTERRUPTED for row in rows))
