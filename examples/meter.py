"""Measures the time and the memory of a training program, from inside."""

import ctypes
import resource
import time
import warnings
from pathlib import Path

import torch

M_MMAP_THRESHOLD = -3  # a constant of malloc.h


class Meter:
    """Measures time, and memory: of torch's tensors on a GPU, of the process on a CPU."""

    def __init__(self, device: str) -> None:
        self.seconds: list[float] = []
        self._on_gpu = torch.device(device).type == "cuda"
        self._before = 0
        _release_free_memory()
        self.reset_peak()
        self._before = self.peak()

    def start(self) -> None:
        """Begin the first lap, or begin the current lap again."""
        self.wait()
        self._began = time.perf_counter()

    def lap(self) -> None:
        """Record the duration of a lap, print the progress, and begin the next lap."""
        self.wait()  # otherwise only the launches would be timed
        self.seconds.append(time.perf_counter() - self._began)
        print(f"step {len(self.seconds)}", flush=True)
        self._began = time.perf_counter()

    def begin_memory(self) -> None:
        """Measure the memory of what follows, but no times: on a CPU it becomes slower.

        glibc keeps freed memory for later tensors, and loses some of it between tensors that are
        live. From now on each tensor has pages of its own, as far as it fills any.
        """
        libc = ctypes.CDLL(None)
        if not self._on_gpu and hasattr(libc, "mallopt"):
            libc.mallopt(M_MMAP_THRESHOLD, 2**16)
        _release_free_memory()
        self.reset_peak()

    def wait(self) -> None:
        """Wait for the GPU."""
        if self._on_gpu:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """Forget the peak until now."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from VmRSS
        except OSError as error:
            warnings.warn(f"peaks include all earlier parts of the run: {error}", stacklevel=1)

    def peak(self) -> int:
        """Return the peak memory in bytes, minus the memory when this meter was made."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated() - self._before
        try:
            status = Path("/proc/self/status").read_text()
            peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return peak - self._before


def _release_free_memory() -> None:
    """Give the system what malloc keeps of freed memory: to use it again would not count."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # only glibc has it
        libc.malloc_trim(0)
