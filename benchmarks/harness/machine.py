"""Describes the machine of the measurements: device, clocks, versions and measured ceilings."""

import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from harness.case import OURS, CeilingKind, Ceilings, Provider
from harness.timing import cache_flusher, cpu_clock, cuda_clock, interleaved

CEILING_ROUNDS = 9
CEILING_SIDE = {"cpu": 2048, "cuda": 8192}  # rows and columns of a matrix
CEILING_BYTES = {"cpu": 256 * 2**20, "cuda": 2**30}  # many times the size of any cache


@dataclass(frozen=True)
class Machine:
    """The machine's columns. Every row of the CSV has them, so that it can be read on its own."""

    device: str
    clocks: str
    threads: int
    torch: str
    cuda: str  # empty on a CPU run
    ampfuse: str
    date: str

    @property
    def name(self) -> str:
        """The device for titles, with the threads of a CPU, on which its speed depends."""
        return self.device if self.cuda else f"{self.device}, {self.threads} threads"


def cpu_field(name: str) -> str:
    """Return the first value of a field of /proc/cpuinfo, or an empty string."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else ""


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_field("model name") or platform.processor() or platform.machine()


def clocks(device: torch.device) -> str:
    """Return the present clocks, or an empty string. Call this while the device is warm."""
    if device.type != "cuda":
        megahertz = cpu_field("cpu MHz")
        return f"{float(megahertz):.0f} MHz" if megahertz else ""
    uuid = torch.cuda.get_device_properties(device).uuid
    query = ["nvidia-smi", f"--id=GPU-{uuid}", "--format=csv,noheader"]
    query.append("--query-gpu=clocks.sm,clocks.mem")
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return "SM {}, memory {}".format(*answer.stdout.strip().split(", ", 1))


def describe(device: torch.device) -> Machine:
    """Describe the machine. Raise ImportError without ampfuse, since nothing can be compared."""
    return Machine(
        device=device_name(device),
        clocks=clocks(device),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        cuda=(torch.version.cuda or "") if device.type == "cuda" else "",
        ampfuse=import_module(OURS).build_info()["version"],
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def slug(text: str) -> str:
    """Return a folder name: lower case, words joined by single hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def available_bytes(device: torch.device) -> int:
    """Return the number of bytes that a case may still allocate on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + reusable
    match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match, "MemAvailable is there since Linux 3.14"
    return int(match.group(1)) * 1024


def measure_ceilings(device: torch.device, products: Iterable[torch.dtype] = ()) -> Ceilings:
    """Measure GB/s of a plain read, copy and update; bytes read and bytes written both count.

    Also measure GFLOP/s of a product of two large matrices in each dtype of `products`.
    """
    size = CEILING_BYTES[device.type]
    source = torch.rand(size // 4, device=device)
    target = torch.rand(size // 4, device=device)
    total = torch.empty((), device=device)
    work: dict[CeilingKind | torch.dtype, int] = {
        "read": size,
        "copy": 2 * size,
        "update": 2 * size,
    }
    runs: list[Provider] = [
        Provider("read", lambda: torch.sum(source, dim=0, out=total)),
        Provider("copy", lambda: target.copy_(source)),
        Provider("update", lambda: target.mul_(0.999)),
    ]
    for dtype in products:
        side = CEILING_SIDE[device.type]
        factor = torch.rand(side, side, device=device).to(dtype)
        runs.append(Provider(str(dtype), partial(torch.mm, factor, factor)))
        work[dtype] = 2 * side**3
    clock = (cuda_clock if device.type == "cuda" else cpu_clock)(cache_flusher(device))
    for run in runs:
        clock(run)
    timings = interleaved(runs, clock, CEILING_ROUNDS)
    return {kind: work[kind] / timings[str(kind)].median / 1e9 for kind in work}
