"""Rows: the results of one provider in one case, as numbers, as CSV and as table cells."""

import csv
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from harness.case import OURS, Case, Ceilings, Products, Provider
from harness.contention import MOST_OTHER_CORES
from harness.machine import Machine
from harness.timing import Measurement

EVERY_PROVIDER = "(all)"  # the provider column of a case that could not be set up


def rate_text(gb_per_s: float | None, gflop_per_s: float | None) -> str:
    if gflop_per_s is not None:
        return f"{gflop_per_s:.0f} GFLOP/s"
    return "" if gb_per_s is None else f"{gb_per_s:.1f} GB/s"


@dataclass(frozen=True)
class Row:
    """One line of the CSV, before the machine's columns. Numbers are None if nothing ran."""

    operation: str
    shape: str
    dtype: str
    elements: int
    provider: str
    status: str  # "ok", "skipped: why" or "failed: why"
    method: str = ""
    rounds: int | None = None
    median_ms: float | None = None
    lower_ms: float | None = None
    upper_ms: float | None = None
    bytes_per_element: float | None = None  # at the floor
    moved_per_element: float | None = None  # bytes that this provider's passes read and write
    gb_per_s: float | None = None
    gflop_per_s: float | None = None  # rate of the fewest products, if these decide the time
    ceiling: str = ""
    ceiling_gb_per_s: float | None = None
    ceiling_gflop_per_s: float | None = None
    of_ceiling: float | None = None
    peak_mib: float | None = None  # in addition to the arguments, with what a provider holds
    time_over_ampfuse: float | None = None  # above 1: slower than ampfuse
    other_cores: float | None = None  # cores that others kept busy while the case was timed

    @property
    def case(self) -> str:
        """The case's name, as `--cases` takes it."""
        return f"{self.operation}/{self.shape}/{self.dtype}"

    @property
    def rate(self) -> str:
        """The rate with its unit."""
        return rate_text(self.gb_per_s, self.gflop_per_s)


COLUMNS = [field.name for field in fields(Row)] + [field.name for field in fields(Machine)]


def unmeasured(case: Case, provider: str, status: str) -> Row:
    return Row(case.operation, case.shape, case.dtype_name, case.elements, provider, status)


def measured(
    case: Case,
    provider: Provider,
    measurement: Measurement,
    ceiling: float,
) -> Row:
    timing = measurement.timings[provider.name]
    ours = measurement.timings.get(OURS)
    rate = case.traffic.total / timing.median / 1e9
    is_product = isinstance(case.traffic, Products)
    peak = measurement.peaks.get(provider.name)
    return Row(
        operation=case.operation,
        shape=case.shape,
        dtype=case.dtype_name,
        elements=case.elements,
        provider=provider.name,
        status="ok",
        method=measurement.method,
        rounds=timing.rounds,
        median_ms=timing.median * 1e3,
        lower_ms=timing.lower * 1e3,
        upper_ms=timing.upper * 1e3,
        bytes_per_element=None if is_product else case.traffic.total / case.elements,
        moved_per_element=provider.moves,
        gb_per_s=None if is_product else rate,
        gflop_per_s=rate if is_product else None,
        ceiling="product" if is_product else str(case.traffic.against),
        ceiling_gb_per_s=None if is_product else ceiling,
        ceiling_gflop_per_s=ceiling if is_product else None,
        of_ceiling=rate / ceiling,
        peak_mib=None if peak is None else peak / 2**20,
        time_over_ampfuse=timing.median / ours.median if ours else None,
        other_cores=measurement.other_cores,
    )


def rows_of(
    case: Case,
    providers: Sequence[Provider],
    measurement: Measurement,
    ceilings: Ceilings,
) -> list[Row]:
    """Return one row per provider, in the case's order, even if it was skipped or failed."""
    ceiling = ceilings[case.traffic.against]
    rows = []
    for provider in providers:
        name = provider.name
        if name in measurement.timings:
            rows.append(measured(case, provider, measurement, ceiling))
        elif name in measurement.skipped:
            rows.append(unmeasured(case, name, f"skipped: {measurement.skipped[name]}"))
        else:
            rows.append(unmeasured(case, name, f"failed: {measurement.failed[name]}"))
    return rows


@contextmanager
def csv_file(path: Path, machine: Machine) -> Iterator[Callable[[Sequence[Row]], None]]:
    """Yield a function that writes rows to a new file at once, so that interrupts lose no rows."""
    columns = asdict(machine)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()

        def write(rows: Sequence[Row]) -> None:
            for row in rows:
                cells = {
                    name: f"{value:.6g}" if isinstance(value, float) else value
                    for name, value in asdict(row).items()
                }
                writer.writerow(cells | columns)
            file.flush()

        yield write


def lines_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a CSV, with times and memory."""
    return [
        Row(
            operation=line["operation"],
            shape=line["shape"],
            dtype=line["dtype"],
            elements=int(line["elements"]),
            provider=line["provider"],
            status=line["status"],
            median_ms=number_in(line.get("median_ms")),
            peak_mib=number_in(line.get("peak_mib")),
        )
        for line in lines_of(path)
    ]


def read_machine(path: Path) -> Machine:
    """Return the machine of a CSV, which has at least one row."""
    line = lines_of(path)[0]
    columns: dict[str, Any] = {field.name: line[field.name] for field in fields(Machine)}
    return Machine(**columns | {"threads": int(columns["threads"])})


def number_in(cell: str | None) -> float | None:
    return float(cell) if cell else None


TABLE_HEADINGS = ["operation", "case", "provider", "ms", "quartiles"]
TABLE_HEADINGS += ["B/elem", "moves", "rate", "ceiling", "MiB", "ampfuse"]


def number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def table_cells(row: Row) -> list[str]:
    """Return the row for the terminal: rounded, or with one word if nothing was measured."""
    start = [row.operation, f"{row.shape} {row.dtype}", row.provider]
    if row.median_ms is None or row.lower_ms is None or row.upper_ms is None:
        return [*start, row.status.partition(":")[0], *[""] * (len(TABLE_HEADINGS) - 4)]
    ratio = "" if row.time_over_ampfuse is None else f"{row.time_over_ampfuse:.2f}x"
    return [
        *start,
        f"{row.median_ms:.3f}",
        f"{row.lower_ms:.3f} - {row.upper_ms:.3f}",
        number(row.bytes_per_element, ".3g"),
        number(row.moved_per_element, ".3g"),
        row.rate,
        f"{row.of_ceiling:.0%}",
        number(row.peak_mib, ".0f"),
        ratio,
    ]


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return the reasons for missing or doubtful numbers, each with the cases that it affects."""
    cases: dict[str, dict[str, None]] = {}  # a dict as a set that keeps its order
    for row in rows:
        if row.status != "ok":
            reason = f"{row.provider} {row.status}"
        elif row.other_cores and row.other_cores > MOST_OTHER_CORES:
            reason = f"doubtful: other processes kept over {MOST_OTHER_CORES} cores busy"
        else:
            continue
        cases.setdefault(reason, {})[row.case] = None
    return [f"{reason} [{', '.join(where)}]" for reason, where in cases.items()]
