"""Draws charts as SVG, which a page can contain. The page's style sheet gives them their colors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 860, 220
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 10, 34  # margins
TICKS = 5
TIPS = 100  # columns of a chart that show their numbers under the mouse


@dataclass(frozen=True)
class Axes:
    """The ranges of a chart."""

    first: float
    last: float
    low: float
    high: float

    def x(self, value: float) -> float:
        """Return the horizontal position of a value."""
        return LEFT + (value - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        part = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM)


def stacked_bar(parts: dict[str, float]) -> str:
    """Draw one bar of named parts."""
    total = sum(parts.values())
    drawn, begin = [], 0.0
    for name, size in parts.items():
        width = WIDTH * size / total
        tip = f"{name}: {size / total:.1%}"
        drawn.append(
            f'<rect class="{name}" x="{begin:.1f}" y="0" width="{width:.1f}" height="28">'
            f"<title>{escape(tip)}</title></rect>"
        )
        begin += width
    return f'<svg viewBox="0 0 {WIDTH} 28" role="img">{"".join(drawn)}</svg>'


def stacked_areas(xs: Sequence[float], layers: dict[str, list[float]], unit: str) -> str:
    """Draw named layers on top of each other, over at least one x."""
    totals = [sum(values) for values in zip(*layers.values(), strict=True)]
    axes = Axes(xs[0], xs[-1] + width_of(xs), 0, ceiling(totals))
    floor = [0.0] * len(xs)
    drawn = [grid(axes, unit)]
    for name, values in layers.items():
        top = [low + value for low, value in zip(floor, values, strict=True)]
        outline = stairs(axes, xs, top) + stairs(axes, xs, floor)[::-1]
        drawn.append(f'<polygon class="{name}" points="{joined(outline)}"/>')
        floor = top
    return svg([*drawn, *tips(axes, xs, layers, unit)])


def lines(xs: Sequence[float], layers: dict[str, list[float]], unit: str) -> str:
    """Draw named lines from 0 on."""
    highest = [max(values) for values in zip(*layers.values(), strict=True)]
    axes = Axes(xs[0], xs[-1] + width_of(xs), 0, ceiling(highest))
    drawn = [grid(axes, unit)]
    for name, values in layers.items():
        points = [(axes.x(x), axes.y(value)) for x, value in zip(xs, values, strict=True)]
        drawn.append(f'<polyline class="{name}" points="{joined(points)}"/>')
    return svg([*drawn, *tips(axes, xs, layers, unit)])


def powers(xs: Sequence[float], values: list[float], crosses: Sequence[int]) -> str:
    """Draw positive values on a logarithmic scale, with crosses at these indices."""
    logs = [math.log2(max(value, 2.0**-149)) for value in values]
    low, high = math.floor(min(logs)) - 1, math.ceil(max(logs)) + 1
    axes = Axes(xs[0], xs[-1] + 1, low, high)
    step = max(1, round((high - low) / TICKS))
    drawn = [labels_of_x(axes)]
    drawn += [level(axes, power, f"2^{power}") for power in range(low, high + 1, step)]
    drawn.append(f'<polyline class="scale" points="{joined(stairs(axes, xs, logs))}"/>')
    for index in crosses:
        x, y = axes.x(xs[index]), axes.y(logs[index])
        drawn.append(
            f'<path class="skipped" d="M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6">'
            f"<title>update {xs[index]:,.0f}: the step was skipped</title></path>"
        )
    return svg(drawn)


def width_of(xs: Sequence[float]) -> float:
    """Return the distance of two points."""
    return xs[1] - xs[0] if len(xs) > 1 else 1.0


def stairs(axes: Axes, xs: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points of a line that keeps each value until the next x."""
    ends = [*xs[1:], axes.last]
    return [
        point
        for x, end, value in zip(xs, ends, values, strict=True)
        for point in ((axes.x(x), axes.y(value)), (axes.x(end), axes.y(value)))
    ]


def joined(points: Sequence[tuple[float, float]]) -> str:
    """Return points as SVG wants them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def ceiling(values: Sequence[float]) -> float:
    """Return the upper end of an axis, which cuts off rare spikes that would flatten the rest."""
    ordered = sorted(values)
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    return min(ordered[-1], 3 * usual) * 1.05 or 1.0


def nice_ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two numbers."""
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * k for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def level(axes: Axes, value: float, text: str) -> str:
    """Draw a horizontal line with a label."""
    y = axes.y(value)
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>'
    )


def labels_of_x(axes: Axes) -> str:
    """Draw the labels of the horizontal axis, which counts steps."""
    drawn = [
        f'<text x="{axes.x(tick):.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">'
        f"{tick:,.0f}</text>"
        for tick in nice_ticks(axes.first, axes.last)
        if tick == int(tick)
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    name = f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">step</text>'
    return "".join([*drawn, name])


def grid(axes: Axes, unit: str) -> str:
    """Draw both axes."""
    ticks = nice_ticks(axes.low, axes.high)
    levels = [level(axes, tick, f"{tick:,.4g} {unit}") for tick in ticks]
    return labels_of_x(axes) + "".join(levels)


def tips(axes: Axes, xs: Sequence[float], layers: dict[str, list[float]], unit: str) -> list[str]:
    """Draw columns that cannot be seen, but show their numbers under the mouse."""
    stride = math.ceil(len(xs) / TIPS)
    drawn = []
    for first in range(0, len(xs), stride):
        begin = axes.x(xs[first])
        end = axes.x(xs[first] + stride * width_of(xs))
        rows = [f"step {xs[first]:,.0f}"]
        for name, values in layers.items():
            part = values[first : first + stride]
            rows.append(f"{name}: {sum(part) / len(part):,.4g} {unit}")
        drawn.append(
            f'<rect class="tip" x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join(rows))}</title></rect>'
        )
    return drawn


def svg(drawn: Sequence[str]) -> str:
    """Return a chart."""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'
