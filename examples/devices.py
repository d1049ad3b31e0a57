"""What depends on the device: the lower precision, and how to ask for the most memory held."""

import contextlib
import resource
from pathlib import Path

import torch


def low_precision(device: torch.device) -> torch.dtype:
    """float16 on a GPU, where the loss scale has a job; bfloat16 on a CPU."""
    return torch.float16 if device.type == "cuda" else torch.bfloat16


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new peak, so that one run does not report the run before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from VmRSS


def peak_memory(device: torch.device) -> int:
    """Bytes: of torch's tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
