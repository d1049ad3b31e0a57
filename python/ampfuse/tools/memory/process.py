"""Reads how much memory this process takes, on the host and on its GPUs."""

import os
from collections.abc import Callable
from pathlib import Path


def host_memory() -> int:
    """Return the physical memory of this process; 0 if it cannot be read."""
    # Pages of files, for example of a dataset that is mapped into memory, can be dropped.
    try:
        resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    except OSError:  # the process may have reached its limit of open files
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def gpu_process_memory() -> Callable[[], int]:
    """Return a function that returns the memory of this process on all GPUs; 0 if not known."""
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    except Exception:  # no library, no driver, or no GPU
        return lambda: 0
    own = os.getpid()

    def memory() -> int:
        try:
            running = [
                one
                for handle in handles
                for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ]
        except Exception:  # not supported, for example in virtual machines
            return 0
        return sum(one.usedGpuMemory or 0 for one in running if one.pid == own)

    return memory
