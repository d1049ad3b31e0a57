"""Draws the pictures of benchmarks again, from the numbers that were kept.

python benchmarks/plots.py benchmarks/results/*/*.csv
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from harness.pictures import PICTURES
from harness.plot import plot
from harness.report import read_machine, read_rows


def main(paths: Sequence[str]) -> int:
    """Draw a PNG beside each CSV that has a picture."""
    for path in map(Path, paths):
        if path.stem in PICTURES:
            plot(path.with_suffix(".png"), path.stem, read_machine(path), read_rows(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
