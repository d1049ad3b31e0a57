"""The command `python -m ampfuse compare`: what differs between two reports."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ampfuse._texts import size_text
from ampfuse.tools.command.options import refuse

USAGE = "python -m ampfuse compare before.json after.json"
HELP = f"""usage: {USAGE}

Print what differs between two runs: times, memory, skipped steps and hints.

examples:
  python -m ampfuse --json before.json train.py
  python -m ampfuse --json after.json train.py --workers 4
  python -m ampfuse compare before.json after.json"""
LEAST_SHARE = 0.01  # of a step, of a phase that is shown
Row = tuple[str, str, str, str]


def main(arguments: Sequence[str]) -> NoReturn:
    """Run `python -m ampfuse compare` with these arguments."""
    if "--help" in arguments or "-h" in arguments:
        print(HELP)
        sys.exit(0)
    if len(arguments) != 2 or any(name.startswith("-") for name in arguments):
        print(f"usage: {USAGE}", file=sys.stderr)
        sys.exit(2)
    before, after = map(read, arguments)
    rows = [("", arguments[0], arguments[1], "change"), *differences(before, after)]
    if before["program"] != after["program"]:
        rows.insert(1, ("program", before["program"], after["program"], ""))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        name, *numbers = row
        cells = [f"{text:>{width}}" for text, width in zip(numbers, widths[1:], strict=True)]
        print(f"{name:<{widths[0]}}  {'  '.join(cells)}".rstrip())
    kinds = [{_kind(hint) for hint in report["hints"]} for report in (before, after)]
    for text, report, others in (("no longer", before, kinds[1]), ("new", after, kinds[0])):
        for hint in report["hints"]:
            if _kind(hint) not in others:
                print(f"{text}: {hint}")
    sys.exit(0)


def _kind(hint: str) -> str:
    """Return a hint without its numbers."""
    return re.sub(r"\d[\d.,]*", "", hint)


def read(name: str) -> dict[str, Any]:
    """Return a report."""
    try:
        report = json.loads(Path(name).read_text())
    except (OSError, ValueError) as error:
        refuse(f"compare: cannot read {name}: {error}")
    if (
        not isinstance(report, dict)
        or not {"program", "steps", "scalers", "peak_memory", "hints"} <= report.keys()
    ):
        refuse(f"compare: {name} is not a report that python -m ampfuse --json has written")
    return report


def differences(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Row]:
    """Return a row for each number, of times, memory and scalers."""
    yield from differences_of_steps(before["steps"], after["steps"])
    peaks = before["peak_memory"], after["peak_memory"]
    for device in dict.fromkeys([*peaks[0], *peaks[1]]):
        name = "peak memory" if device == "host" else f"on {device}"
        yield row(name, [peak.get(device) for peak in peaks], size_text)
    if not (before["scalers"] and after["scalers"]):
        return
    for name in ("taken", "skipped"):
        counts = [sum(one.get(name, 0) for one in report["scalers"]) for report in (before, after)]
        change = f"{counts[1] - counts[0]:+,}"
        yield row(f"steps {name}", counts, "{:,}".format, change)
    scales = [report["scalers"][-1]["scale"] for report in (before, after)]
    yield row("last scale", scales, "{:,.6g}".format, "")


def differences_of_steps(
    before: dict[str, Any] | None, after: dict[str, Any] | None
) -> Iterator[Row]:
    """Return the rows about times."""
    counts = [None if steps is None else steps["count"] for steps in (before, after)]
    yield row("steps", counts, "{:,}".format, "", missing="few")
    if before is None or after is None:
        return
    both = before["milliseconds"], after["milliseconds"]
    wholes = [sum(times.values()) for times in both]
    yield row("a step", wholes, "{:,.2f} ms".format)
    medians = [one["quartiles"][1] for one in (before, after)]
    noise = " (within noise)" if is_noise(before["quartiles"], after["quartiles"]) else ""
    change = f"{medians[1] / medians[0] - 1:+.0%}{noise}"
    yield row("  median", medians, "{:,.2f} ms".format, change)
    for phase in both[0]:
        times = [one[phase] for one in both]
        if any(time > LEAST_SHARE * whole for time, whole in zip(times, wholes, strict=True)):
            yield row(f"  {phase}", times, "{:,.2f} ms".format)


def is_noise(before: list[float], after: list[float]) -> bool:
    """Return True if each median is among the middle half of the other's steps."""
    return before[0] <= after[1] <= before[2] and after[0] <= before[1] <= after[2]


def row(
    name: str,
    values: Sequence[float | None],
    text: Callable[[Any], str],
    change: str | None = None,
    missing: str = "",
) -> Row:
    """Return a row; `change` is the one in percent if it is not given."""
    first, second = values
    if change is None:
        change = f"{second / first - 1:+.0%}" if first and second is not None else ""
    before, after = (missing if value is None else text(value) for value in values)
    return name, before, after, change
