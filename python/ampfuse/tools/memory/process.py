"""Reads how much memory this process takes on the host."""

import os
from pathlib import Path


def host_memory() -> int:
    """Return the physical memory of this process; 0 if it cannot be read."""
    # Pages of files, for example of a dataset that is mapped into memory, can be dropped.
    try:
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except OSError:  # the process may have reached its limit of open files
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
