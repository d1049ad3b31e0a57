"""Output to the terminal: a progress bar and a table by rich, or plain lines without rich."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from harness.report import TABLE_HEADINGS, Row, remarks, table_cells

TABLE_COLUMNS = 120  # width in characters if the output is not a terminal
NARROW_COLUMNS = 105  # in a narrower table, the quartiles are left out


class Progress:
    """Progress as one line per case, for log files."""

    def __init__(self, cases: int) -> None:
        self._cases = cases
        self._started = 0

    def case(self, name: str) -> None:
        """Report that a case begins."""
        self._started += 1
        print(f"[{self._started}/{self._cases}] {name}", flush=True)

    def stage(self, text: str) -> None:
        """Report that the case has reached the stage `text`."""

    def advance(self) -> None:
        """Report that a round is over."""


def rich_is_usable() -> bool:
    return find_spec("rich") is not None


@contextmanager
def progress(cases: int, rounds: int) -> Iterator[Progress]:
    """Show a bar that moves once per round on a terminal; plain lines in files or without rich."""
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
            # Set the position instead of adding to it: the last case may have failed half-way.
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
    """Print the table, and below it the reasons for missing results."""
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
