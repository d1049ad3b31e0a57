"""Writes the tables of results into the pages, from the numbers that were kept.

python benchmarks/tables.py           # write them
python benchmarks/tables.py --check   # only say which pages have other numbers

A table stands between `<!-- table: NAME -->` and `<!-- end -->`; NAME is a key of TABLES.
"""

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from harness.published import IN_CHINESE, TABLES, Column, Line, Table

ROOT = Path(__file__).parents[1]
PAGES: dict[str, Mapping[str, str]] = {
    "README.md": {},
    "README.zh-CN.md": IN_CHINESE,
    "docs/benchmarks.md": {},
}
RESULTS = ROOT / "benchmarks" / "results"
FILES = [str(path.relative_to(RESULTS)) for path in sorted(RESULTS.glob("*/*.csv"))]
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Key = tuple[str, str, str, str]


@cache
def results(file: str) -> dict[Key, dict[str, str]]:
    """Read the rows of a CSV that have numbers, by operation, shape, dtype and provider."""
    with (RESULTS / file).open() as lines:
        rows = [row for row in csv.DictReader(lines) if row["status"] == "ok"]
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


def markdown(table: Table, translations: Mapping[str, str]) -> str:
    """Return a table as Markdown."""
    heads = [*table.heads, *(column.head for column in table.columns)]
    rule = ["---"] * len(table.heads) + ["---:"] * len(table.columns)
    lines = [[*line.labels, *cells(line, table.columns)] for line in table.lines]
    if table.has_ratio:
        heads.append("ratio")
        rule.append("---:")
        lines = [
            [*cells, ratio(line, table.columns)]
            for cells, line in zip(lines, table.lines, strict=True)
        ]
    translated = [[translations.get(cell, cell) for cell in row] for row in (heads, *lines)]
    translated.insert(1, rule)
    return "".join(f"| {' | '.join(row)} |\n" for row in translated)


def rows_of(lines: Iterator[Sequence[str]]) -> str:
    """Return lines of cells, the first of which are headings, as Markdown."""
    first, *others = lines
    drawn = [first, ["---"] * len(first), *others]
    return "".join(f"| {' | '.join(line)} |\n" for line in drawn)


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
        rows = results(file)
        for operation, shape, dtype in dict.fromkeys(key[:3] for key in rows):
            times = {
                key[3]: float(row["median_ms"])
                for key, row in rows.items()
                if key[:3] == (operation, shape, dtype)
            }
            best = min(times, key=lambda provider: times[provider])
            ours = times.get("ampfuse", 0.0)
            if times[best] < 0.95 * ours:
                ratio = f"{ours / times[best]:.2f} ×"
                case = (f"`{file}`", operation, shape, dtype)
                yield *case, best, text(times[best]), text(ours), ratio


def with_tables(page: str, translations: Mapping[str, str]) -> str:
    """Return a page's text with the current tables."""
    computed = {"runs": runs, "lost": lost}

    def filled(match: re.Match[str]) -> str:
        name = match[2]
        is_computed = name in computed
        table = rows_of(computed[name]()) if is_computed else markdown(TABLES[name], translations)
        return match[1] + table + match[3]

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
