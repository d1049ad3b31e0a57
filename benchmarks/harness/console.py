"""The terminal: a progress bar and a table through rich, or plain lines where rich is missing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from harness.report import TABLE_HEADINGS, Row, remarks, table_cells

TABLE_COLUMNS = 120  # of characters, where the output is no terminal with a width of its own
NARROW_COLUMNS = 105  # below this the quartiles are left to the CSV


class Progress:
    """One line a case: what a log file can hold."""

    def __init__(self, cases: int) -> None:
        self._cases = cases
        self._started = 0

    def case(self, name: str) -> None:
        """A case begins."""
        self._started += 1
        print(f"[{self._started}/{self._cases}] {name}", flush=True)

    def stage(self, text: str) -> None:
        """The case has come to `text`."""

    def advance(self) -> None:
        """A round is over."""


def rich_is_usable() -> bool:
    return find_spec("rich") is not None


@contextmanager
def progress(cases: int, rounds: int) -> Iterator[Progress]:
    """A bar that moves once a round on a terminal; plain lines into a file or without rich."""
    if not rich_is_usable():
        print("rich is not installed: plain text output", flush=True)
        yield Progress(cases)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console()
    if not console.is_terminal:
        yield Progress(cases)
        return

    class RichProgress(Progress):
        def __init__(self, bar: Bar) -> None:
            super().__init__(cases)
            self._bar = bar
            self._task = bar.add_task("", total=cases * rounds)
            self._name = ""

        def case(self, name: str) -> None:
            # Set, not added to: a case that failed half-way leaves the bar in the right place.
            self._bar.update(self._task, completed=self._started * rounds)
            self._started += 1
            self._name = name
            self.stage("set-up")

        def stage(self, text: str) -> None:
            self._bar.update(self._task, description=f"{self._name}  {text}", refresh=True)

        def advance(self) -> None:
            self._bar.update(self._task, advance=1, refresh=True)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    bar = Bar(*columns, TimeElapsedColumn(), console=console, transient=True, auto_refresh=False)
    with bar:  # drawn between timed runs only: a redrawing thread would take a core from them
        yield RichProgress(bar)


def show_table(title: str, rows: Sequence[Row]) -> None:
    """The table, and under it why anything is missing from it."""
    (show_rich_table if rich_is_usable() else show_plain_table)(title, rows)
    print(*remarks(rows), sep="\n")


def show_plain_table(title: str, rows: Sequence[Row]) -> None:
    cells = [TABLE_HEADINGS, *(table_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    print(f"\n{title}")
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def show_rich_table(title: str, rows: Sequence[Row]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("case", min_width=16)
    headings = TABLE_HEADINGS[2:]
    shown = [
        i for i, h in enumerate(headings) if console.width >= NARROW_COLUMNS or h != "quartiles"
    ]
    for index in shown:
        table.add_column(headings[index], justify="right" if index else "left", no_wrap=True)
    last = ""
    for row in rows:
        operation, shape, *rest = table_cells(row)
        case = f"{operation} {shape}"
        if case != last and last:
            table.add_section()
        table.add_row("" if case == last else case, *(rest[index] for index in shown))
        last = case
    console.print(table)
