"""Measures the peak of memory from a moment on."""

import ctypes
from contextlib import suppress
from pathlib import Path

import torch

from ampfuse._graphs import uses_gpu


class PeakMemory:
    """The peak of memory: of tensors on a GPU, or of this process beyond its start."""

    def __init__(self) -> None:
        self._start = _status().get("RssAnon", 0)

    def begin(self) -> None:
        """Forget the peak until now."""
        if uses_gpu():
            torch.cuda.reset_peak_memory_stats()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # give back what the analysis has freed
            Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int | None:
        """Return the peak in bytes, or None if it is not known."""
        if uses_gpu():
            return torch.cuda.max_memory_allocated()
        now = _status()
        if "VmHWM" not in now or "RssFile" not in now:
            return None
        return now["VmHWM"] - now["RssFile"] - now.get("RssShmem", 0) - self._start


def _status() -> dict[str, int]:
    """Return the sizes that the kernel reports on this process, in bytes."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split(":") for line in lines if line.endswith(" kB"))
    return {name: int(size.split()[0]) * 1024 for name, size in pairs}
