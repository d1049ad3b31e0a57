"""The command `python -m ampfuse compare`: what differs between two reports."""

import json
import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ampfuse._texts import columns, size_text
from ampfuse.tools.command.options import refuse

EPILOG = """examples:
  python -m ampfuse --json before.json train.py
  python -m ampfuse --json after.json train.py --workers 4
  python -m ampfuse compare before.json after.json"""
KEYS = {"program", "steps", "scalers", "peak_memory", "hints"}
NOISE = "within the spread"
CAUTION = (
    f"{NOISE}: the usual times of the steps overlap. Where they do not, other work of the machine "
    "may be the reason: compare runs on a quiet machine."
)
# The phases that hints are about, by words of the hints.
ABOUT = {"waits for input": "input", "passes outside of forward": "other"}


def main(arguments: Sequence[str]) -> NoReturn:
    """Run `python -m ampfuse compare` with these arguments."""
    parser = ArgumentParser(
        prog="python -m ampfuse compare",
        description="Print what differs between two runs: times, memory, skipped steps and hints.",
        epilog=EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("before", metavar="before.json")
    parser.add_argument("after", metavar="after.json")
    given = parser.parse_args(arguments)
    before, after = read(given.before), read(given.after)
    table = [("", given.before, given.after, "change"), *rows(before, after)]
    print("\n".join(columns(table)))
    kinds = [{_kind(hint) for hint in report["hints"]} for report in (before, after)]
    for text, report, others in (("no longer", before, kinds[1]), ("new", after, kinds[0])):
        for hint in report["hints"]:
            phase = next((name for words, name in ABOUT.items() if words in hint), "")
            if _kind(hint) not in others and not is_noise(before, after, phase):
                print(f"{text}: {hint}")
    if any(cells[-1] == NOISE for cells in table):
        print(CAUTION)
    sys.exit(0)


def _kind(hint: str) -> str:
    return re.sub(r"\d[\d.,]*", "", hint)


def read(name: str) -> dict[str, Any]:
    """Return a report."""
    other = f"compare: {name} is not a report that python -m ampfuse --json has written"
    try:
        report = json.loads(Path(name).read_text())
    except FileNotFoundError:
        refuse(
            f"compare: there is no file {name}: write it with python -m ampfuse --json {name} "
            "train.py"
        )
    except OSError as error:
        refuse(f"compare: cannot read {name}: {error.strerror}")
    except ValueError:  # it is no JSON, or no text
        refuse(other)
    if not isinstance(report, dict) or not report.keys() >= KEYS:
        refuse(other)
    if report["steps"] is not None and "spread" not in report["steps"]:
        refuse(f"compare: {name} was written by an older version: run the program again")
    return report


def rows(before: dict[str, Any], after: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Return a row for each figure: its name, both values, and the change in percent."""
    if before["program"] != after["program"]:
        yield ("program", before["program"], after["program"], "")
    both = [dict(figures(report)) for report in (before, after)]
    for name in dict.fromkeys([*both[0], *both[1]]):
        values = [of_report.get(name) for of_report in both]
        if name.startswith("  ") and not any(values):
            continue  # a phase that neither program has
        texts = ["" if value is None else _text(name, value) for value in values]
        first, second = values
        change = f"{second / first - 1:+.0%}" if first and second is not None else ""
        row = "a step" if name == "  median" else name.strip()
        yield (name, *texts, NOISE if is_noise(before, after, row) else change)


def figures(report: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Return the figures of a report, each with its name."""
    if (steps := report["steps"]) is not None:
        yield "steps", steps["count"]
        yield "a step", sum(steps["milliseconds"].values())
        yield "  median", steps["median"]
        for phase, time in steps["milliseconds"].items():
            yield f"  {phase}", time
    for device, size in report["peak_memory"].items():
        yield "peak memory" if device == "host" else f"peak on {device}", size
    if scalers := report["scalers"]:
        for name in ("taken", "skipped"):
            yield f"steps {name}", sum(one.get(name, 0) for one in scalers)
        yield "last scale", scalers[-1]["scale"]


def _text(name: str, value: float) -> str:
    if name.startswith("peak"):
        return size_text(value)
    return f"{value:,.2f} ms" if name.startswith(("a step", "  ")) else f"{value:.6g}"


def is_noise(before: dict[str, Any], after: dict[str, Any], row: str) -> bool:
    """Return True if the usual times of a row overlap in both reports; False without times."""
    spreads = [(report["steps"] or {}).get("spread", {}).get(row) for report in (before, after)]
    if None in spreads:
        return False
    (low, high), (other_low, other_high) = spreads
    return bool(low <= other_high and other_low <= high)
