"""Writes a report as one HTML page, which needs no other file."""

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from ampfuse.tools.command import charts, show

COLORS = {
    "input": "#d9730d",
    "forward": "#4a90d9",
    "backward": "#1f4e79",
    "optimizer": "#4f8a3c",
    "scaler": "#a9d18e",
    "other": "#9a9a9a",
    "host": "#4a90d9",
    "gpu": "#d9730d",
    "scale": "#4a90d9",
}
MARKS = 500  # of skipped steps that are drawn
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 880px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.1em; margin: 2em 0 .5em; }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: currentColor; opacity: .7; }
.grid { stroke: currentColor; opacity: .15; }
polyline { fill: none !important; stroke-width: 1.5; }
.tip { fill: transparent; } .tip:hover { fill: currentColor; fill-opacity: .12; }
.skipped { stroke: #d1242f; stroke-width: 1.5; }
.hints li { margin: .4em 0; }
.legend { margin: .4em 0; padding: 0; list-style: none; display: flex; flex-wrap: wrap; }
.legend li { margin-right: 1.5em; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
table { border-collapse: collapse; width: 100%; }
td { padding: .2em .8em .2em 0; vertical-align: top; } td:first-child { white-space: nowrap; }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
"""


def write(report: dict[str, Any], path: Path) -> None:
    """Write a report."""
    # Names of files may hold bytes that are not UTF-8.
    path.write_text(page(report), encoding="utf-8", errors="xmlcharrefreplace")


def page(report: dict[str, Any]) -> str:
    """Return a report as HTML."""
    colors = "".join(
        f".{name} {{ fill: {color}; background: {color}; }} polyline.{name} {{ stroke: {color}; }}"
        for name, color in COLORS.items()
    )
    title = escape(show.title(report))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width">'
        f"<style>{STYLE}{colors}</style></head>"
        f"<body><h1>{title}</h1>{''.join(sections(report))}</body></html>\n"
    )


def sections(report: dict[str, Any]) -> Iterator[str]:
    """Return the parts of the page."""
    if report["hints"]:
        hints = "".join(f"<li>{escape(hint)}</li>" for hint in report["hints"])
        yield f'<h2>What to change</h2><ul class="hints">{hints}</ul>'
    if (steps := report["steps"]) is not None:
        yield from of_steps(steps)
    if (memory := report["memory"]) is not None and len(memory["step"]) > 1:
        yield of_memory(memory)
    for number, scaler in enumerate(report["scalers"]):
        if scaler["history"]:
            name = f" {number + 1}" if len(report["scalers"]) > 1 else ""
            yield f"<h2>Loss scale{name}</h2>{of_scaler(scaler)}"
    if steps is not None and steps["lines"]:
        yield of_lines(steps["lines"])
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>"
        for name, text in show.rows(report)
        if name != "hint"
    )
    yield f"<h2>All numbers</h2><table>{rows}</table>"


def of_steps(steps: dict[str, Any]) -> Iterator[str]:
    """Draw the mean step, and all steps over time."""
    milliseconds = steps["milliseconds"]
    whole = sum(milliseconds.values())
    yield f"<h2>A step takes {whole:,.1f} ms</h2>{charts.stacked_bar(milliseconds)}"
    yield legend(
        {name: f"{name} {size:,.1f} ms ({size / whole:.0%})" for name, size in milliseconds.items()}
    )
    timeline = dict(steps["timeline"])
    xs = timeline.pop("step")
    yield f"<h2>Steps</h2>{charts.stacked_areas(xs, timeline, 'ms')}"


def of_memory(memory: dict[str, Any]) -> str:
    """Draw memory over steps."""
    sizes = {name: [size / 2**20 for size in memory[name]] for name in ("host", "gpu")}
    drawn = {name: values for name, values in sizes.items() if any(values)}
    names = {
        "host": "memory of the process, without pages of files",
        "gpu": "memory of tensors on the GPU",
    }
    chart = charts.lines(memory["step"], drawn, "MiB")
    return f"<h2>Memory after each step</h2>{chart}{legend({name: names[name] for name in drawn})}"


def of_scaler(scaler: dict[str, Any]) -> str:
    """Draw a scaler's history."""
    history = scaler["history"]
    scales = [record[0] for record in history]
    skipped = [i for i, record in enumerate(history) if record[1]]
    skipped = skipped[:: math.ceil(len(skipped) / MARKS) or 1]
    changes = [i for i in range(len(history)) if i == 0 or scales[i] != scales[i - 1]]
    kept = sorted({*changes, *skipped, len(history) - 1})
    crosses = [kept.index(i) for i in skipped]
    text = {"scale": "scale"} | ({"skipped": "× skipped"} if skipped else {})
    xs = [show.first_update(scaler) + i for i in kept]
    return charts.powers(xs, [scales[i] for i in kept], crosses) + legend(text)


def of_lines(lines: list[dict[str, Any]]) -> str:
    """Return the lines in which the host spends its time."""
    rows = "".join(
        f"<tr><td>{line['share']:.0%}</td><td>{line['phase']}</td>"
        f"<td>{escape(line['where'])}</td><td><code>{escape(line['text'])}</code></td></tr>"
        for line in lines
        if line["share"] >= 0.01
    )
    return f"<h2>Lines in which the host spends its time</h2><table>{rows}</table>"


def legend(texts: dict[str, str]) -> str:
    """Return a list of colors and what they mean."""
    items = "".join(
        f'<li><i class="{name}"></i>{escape(text)}</li>' for name, text in texts.items()
    )
    return f'<ul class="legend">{items}</ul>'
