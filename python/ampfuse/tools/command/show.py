"""Prints a report to the terminal."""

import math
import sys
from contextlib import suppress
from typing import Any, TextIO

from ampfuse._texts import listed, size_text
from ampfuse.patching.optimizers import CLASSES
from ampfuse.tools.diagnosis.phases import FIRST_STEPS, LEAST_STEPS

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48


def title(report: dict[str, Any]) -> str:
    """Return the title of a report."""
    return f"ampfuse {report['ampfuse']}: {report['program']}"


def rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of a report's table, each a name and a text."""
    found = [("ended", f"{report['ended']}, after {report['seconds']:.1f} s")]
    replaced = [cls.__name__ for cls in CLASSES]
    others = sorted({*report["optimizers_of_torch"]} - {*replaced})
    with_rows = {"scaler": report["scaler_disabled"], "optimizers": bool(others)}  # of their own
    parts = report["parts"].items()
    found += rows_of_parts(
        {name: part for name, part in parts if any(part.values()) or not with_rows.get(name)}
    )
    if others:
        text = f"left to torch: {', '.join(others)}, since ampfuse has only {listed(replaced)}"
        found.append(("optimizers", text))
    if (steps := report["steps"]) is not None:
        found.append(("a step", times_text(steps["milliseconds"])))
        if steps["gpu_milliseconds"]:
            found.append(("on the GPU", times_text(steps["gpu_milliseconds"])))
        if steps["evaluation"] > sum(steps["milliseconds"].values()) / 100:
            found.append(("evaluation", f"{steps['evaluation']:,.1f} ms more for each step"))
    elif report["step_count"] and report["error"] is None:
        needed = FIRST_STEPS + LEAST_STEPS
        text = f"{report['step_count']} were too few to measure: {needed} are needed"
        found.append(("a step", text))
    if report["autocast"] is not None:
        found.append(("autocast", report["autocast"]))
    if report["scaler_disabled"]:
        found.append(("scaler", "disabled: no loss is scaled"))
    for scaler in report["scalers"]:
        found += rows_of_scaler(scaler)
    found += [
        ("peak memory" if device == "host" else f"on {device}", size_text(size))
        for device, size in report["peak_memory"].items()
    ]
    return found + [("hint", hint) for hint in report["hints"]]


def rows_of_parts(parts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows about what was replaced, and how often it was used."""
    found: list[tuple[str, str]] = []
    uncalled = []
    for name, part in parts.items():
        texts = [f"used {_times(part['used'])}"] if part["used"] else []
        if waits := part["waits_avoided"]:
            texts.append(f"host waits avoided: {waits:,}")
        for reason, count in part["left_to_torch"].items():
            texts.append(f"left to torch {_times(count)}: {reason}")
        found += zip([name, *[""] * len(texts)], texts, strict=False)
        if not texts:
            uncalled.append(name)
    if uncalled:  # the program may use ampfuse's own names for these parts, which are not replaced
        text = f"{', '.join(uncalled)}, since the program does not call torch's"
        found.append(("not replaced", text + ("" if found else ", or only in spawned processes")))
    return found


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def times_text(milliseconds: dict[str, float]) -> str:
    """Return the time of a step, and the phases that take more than 1 % of it."""
    whole = sum(milliseconds.values())
    shares = [
        f"{phase} {size / whole:.0%}" for phase, size in milliseconds.items() if size > whole / 100
    ]
    return f"{whole:,.1f} ms: {', '.join(shares)}"


def rows_of_scaler(scaler: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows about a scaler."""
    if not scaler["updates"]:
        return [("scaler", "never updated")]
    steps = f"{scaler['taken']:,} taken, {scaler['skipped']:,} skipped"
    if len(scaler["history"]) < scaler["updates"]:
        steps += f", of the last {len(scaler['history']):,} of {scaler['updates']:,}"
    scales = [record[0] for record in scaler["history"]]
    return [("steps", steps), ("scale", f"{sparkline(scales)} {scaler['scale']:,.10g}")]


def sparkline(scales: list[float]) -> str:
    """Draw scales as a line of bars of logarithmic height, each the lowest of several scales."""
    stretch = max(1, math.ceil(len(scales) / WIDTH))
    lows = [min(scales[first : first + stretch]) for first in range(0, len(scales), stretch)]
    levels = [math.log2(min(max(2.0**-150, low), 2.0**128)) for low in lows]  # 0 is the lowest
    low, span = min(levels), max(levels) - min(levels)
    if span == 0:
        return BARS[len(BARS) // 2] * len(levels)
    return "".join(BARS[round((level - low) / span * (len(BARS) - 1))] for level in levels)


def table(
    rows: list[tuple[str, str]], title: str | None = None, file: TextIO | None = None
) -> None:
    """Print a table of names and texts."""
    if title is not None:
        print(title, file=file)
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        print(f"  {name:<{width}}  {text}".rstrip(), file=file)


def summary(report: dict[str, Any]) -> None:
    """Print the report to the original stderr, even if the program has replaced `sys.stderr`."""
    if (stream := _listening()) is not None:
        table(rows(report), title(report), stream)


def failure(report: dict[str, Any]) -> None:
    """Print one line, since the program's traceback should stay in sight, and the hints."""
    count = report["step_count"]
    steps = "1 step" if count == 1 else f"{count:,} steps"
    say(f"{report['program']} ended {report['ended']}, after {report['seconds']:.1f} s and {steps}")
    for hint in report["hints"]:
        say(f"hint: {hint}")


def say(sentence: str) -> None:
    """Print a line to the original stderr, if that is possible."""
    with suppress(Exception):
        if (stream := _listening()) is not None:
            print(f"python -m ampfuse: {sentence}", file=stream, flush=True)


def _listening() -> TextIO | None:
    stream = sys.__stderr__
    return None if stream is None or stream.closed else stream
