"""`python -m ampfuse env`: what this installation is and what works here."""

import argparse

from ampfuse.env import describe


def print_table(rows: list[tuple[str, str]]) -> None:
    """A table, by rich where it is installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            print(f"{name:<{width}}  {text}")
        return
    table = Table(show_header=False, box=box.SIMPLE)
    table.add_column(style="bold")
    table.add_column()
    for name, text in rows:
        table.add_row(name, text)
    Console().print(table)


def main() -> None:
    """Run a command of `python -m ampfuse`."""
    parser = argparse.ArgumentParser(prog="python -m ampfuse")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="versions, devices, and what of ampfuse works here")
    parser.parse_args()
    print_table(describe())


if __name__ == "__main__":
    main()
