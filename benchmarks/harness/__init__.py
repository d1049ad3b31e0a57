"""Times competing implementations of one operation on one machine, and reports the results.

A benchmark lists its cases and calls `main`; everything else (command line, interleaved rounds,
cold caches, CUDA graphs, ceilings, table, CSV, plot) is here and the same for all of them.
"""

from harness.case import OURS, Case, Products, Provider, Settings, Traffic
from harness.cli import main
from harness.contention import busy_cores, cores

__all__ = [
    "OURS",
    "Case",
    "Products",
    "Provider",
    "Settings",
    "Traffic",
    "busy_cores",
    "cores",
    "main",
]
