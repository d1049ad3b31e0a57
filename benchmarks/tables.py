"""Writes the tables of results into the pages, from the numbers that were kept.

python benchmarks/tables.py           # write them
python benchmarks/tables.py --check   # only say which pages have other numbers

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from harness.published import BOTH, IN_CHINESE, OURS, TABLES, Column, Line, Table
from harness.report import lines_of

ROOT = Path(__file__).parents[1]
PAGES: dict[str, Mapping[str, str]] = {
    "README.md": {},
    "README.zh-CN.md": IN_CHINESE,
    "docs/benchmarks.md": {},
}
RESULTS = ROOT / "benchmarks" / "results"
FILES = [
    str(path.relative_to(RESULTS))
    for path in sorted(RESULTS.glob("*/*.csv"))
    if path.name != "benchmarks.csv"  # what gpu.sh leaves
]
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
OWN = (*OURS.providers, *BOTH.providers)
Key = tuple[str, str, str, str]


@cache
def results(file: str) -> dict[Key, dict[str, str]]:
    """Read the rows of a CSV that have numbers, by operation, shape, dtype and provider."""
    rows = [row for row in lines_of(RESULTS / file) if row["status"] == "ok"]
    return {(row["operation"], row["shape"], row["dtype"], row["provider"]): row for row in rows}


def value(line: Line, column: Column) -> float | None:
    """Return the least number of the column's providers, or None if none was measured."""
    rows = results(line.file)
    found = [
        rows.get((line.operation, line.shape, line.dtype, provider), {}).get(column.field)
        for provider in column.providers
    ]
    return min((float(number) for number in found if number), default=None)


def text(number: float) -> str:
    """Return a number with three digits, or with all its digits before the point."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"


def cells(line: Line, columns: Sequence[Column]) -> Iterator[str]:
    """Yield a line's cells. The least time of a line is bold, and so is the least memory."""
    values = [value(line, column) for column in columns]
    for column, number in zip(columns, values, strict=True):
        alike = [
            other
            for other, its in zip(values, columns, strict=True)
            if its.field == column.field and other is not None
        ]
        if number is None:
            yield ""
        elif column.field == "of_ceiling":
            yield f"{100 * number:.0f} %"
        elif len(alike) > 1 and text(number) == text(min(alike)):
            yield f"**{text(number)}**"
        else:
            yield text(number)


def ratio(line: Line, columns: Sequence[Column]) -> str:
    """Return how many times as long the first column's provider takes as the last one's."""
    first, last = value(line, columns[0]), value(line, columns[-1])
    assert first is not None, line
    assert last is not None, line
    return f"{first / last:.1f} ×"


def rows_of(table: Table, translations: Mapping[str, str]) -> Iterator[Sequence[str]]:
    """Yield a table's headings, and the cells of its lines."""
    heads = [*table.heads, *(column.head for column in table.columns)]
    rows = [[*line.labels, *cells(line, table.columns)] for line in table.lines]
    if table.has_ratio:
        heads.append("ratio")
        for row, line in zip(rows, table.lines, strict=True):
            row.append(ratio(line, table.columns))
    yield from ([translations.get(cell, cell) for cell in row] for row in (heads, *rows))


def markdown(rows: Iterator[Sequence[str]], labels: int) -> str:
    """Return rows, the first of which are headings, as Markdown; numbers follow the labels."""
    heads, *others = rows
    rule = ["---" if index < labels else "---:" for index in range(len(heads))]
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, rule, *others))


def runs() -> Iterator[Sequence[str]]:
    """Yield each machine with the versions that were measured, and the days."""
    yield "results", "machine", "torch", "ampfuse", "measured"
    days: dict[tuple[str, str, str, str], set[str]] = {}
    for file in FILES:
        for row in results(file).values():
            run = (f"`{Path(file).parent}`", row["device"], row["torch"], row["ampfuse"])
            days.setdefault(run, set()).add(row["date"][:10])
    for run, its in sorted(days.items()):
        yield *run, " to ".join(dict.fromkeys((min(its), max(its))))


def lost() -> Iterator[Sequence[str]]:
    """Yield each case in which another provider takes less than 95 % of our time."""
    yield "results", "operation", "shape", "dtype", "faster", "ms", "ampfuse", "ratio"
    for file in FILES:
        cases: dict[tuple[str, ...], dict[str, float]] = {}
        for (*case, provider), row in results(file).items():
            cases.setdefault(tuple(case), {})[provider] = float(row["median_ms"])
        for names, times in cases.items():
            ours = min((times[one] for one in OWN if one in times), default=0.0)
            best = min(times, key=lambda provider: times[provider])
            if times[best] < 0.95 * ours:
                ratio = f"{ours / times[best]:.2f} ×"
                yield f"`{file}`", *names, best, text(times[best]), text(ours), ratio


def with_tables(page: str, translations: Mapping[str, str]) -> str:
    """Return a page's text with the current tables."""
    computed = {"runs": (runs, 5), "lost": (lost, 5)}  # and the number of labels

    def filled(match: re.Match[str]) -> str:
        if match[2] in computed:
            rows, labels = computed[match[2]]
            return match[1] + markdown(rows(), labels) + match[3]
        table = TABLES[match[2]]
        return match[1] + markdown(rows_of(table, translations), len(table.heads)) + match[3]

    return MARKED.sub(filled, (ROOT / page).read_text())


def main(arguments: Sequence[str]) -> int:
    """Write or check all pages; return 1 if a checked page has other numbers."""
    status = 0
    for page, translations in PAGES.items():
        path = ROOT / page
        expected = with_tables(page, translations)
        if path.read_text() == expected:
            continue
        if "--check" in arguments:
            print(f"{page}: other numbers than in the results; run python benchmarks/tables.py")
            status = 1
        else:
            path.write_text(expected)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
