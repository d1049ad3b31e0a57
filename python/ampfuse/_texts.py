"""Sizes and names as people write them."""

import math
import re
from collections.abc import Sequence


def size_text(size: float) -> str:
    """Return a number of bytes with a unit: `"12.5 GiB"`."""
    for unit in ("KiB", "MiB"):
        size /= 1024
        if size < 9999.5:
            return f"{size:,.0f} {unit}" if size >= 99.95 else f"{size:,.1f} {unit}"
    return f"{size / 1024:,.1f} GiB"


def bytes_of(size: float | str) -> int:
    """Return a number of bytes, which may be given as a text like `"24GiB"` or `"500 MB"`.

    A GB is 1000**3 bytes. A GiB is 1024**3 bytes, and so is a G.
    """
    if not isinstance(size, str):
        return int(size)
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?([KMGT])(iB|B)?", size, re.IGNORECASE)
    if match is None:
        raise ValueError(f"expected a size like 24GiB, got {size}")
    number, prefix, unit = match.groups()
    base = 1000 if unit in ("B", "b") else 1024
    return int(float(number) * base ** ("KMGT".index(prefix.upper()) + 1))


def drop_numbers(name: str) -> str:
    """Return the name of a module with `*` in place of numbers, as in `"layers.*.norm"`."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines of a table, whose first column is aligned left and the others right."""
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  ".join([f"{name:<{first}}", *map(str.rjust, cells, widths)]).rstrip()
        for name, *cells in rows
    ]


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return f"{', '.join(names[:-1])} and {names[-1]}"


def percent(share: float) -> str:
    """Return a share as a text with two digits, as in `"0.35 %"`."""
    if share > 10:
        return "> 1,000 %"
    if 0 < share < 1e-6:
        return "< 0.0001 %"
    digits = max(0, 1 - math.floor(math.log10(100 * share))) if share > 0 else 0
    return f"{100 * share:,.{min(digits, 4)}f} %"
