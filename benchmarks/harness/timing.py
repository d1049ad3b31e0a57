"""Interleaved, cache-cold timing: medians and quartiles of rounds in rotated order."""

import ctypes
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from harness.case import Provider

WARM_UPS = 3  # runs for compilation, workspace allocation and lazy module loading
FLUSH_FACTOR = 4  # caches are not strictly least-recently-used, so read several times their size
DEFAULT_CACHE_BYTES = 32 * 2**20
FLUSHES = 16  # number of flushes before a run on a GPU, about a millisecond
GRAPH_BELOW_SECONDS = 100e-6  # in shorter runs, event pairs time the gaps between launches

Clock = Callable[[Provider], float]


@dataclass(frozen=True)
class Timing:
    """The time in seconds: the median of the rounds and the quartiles around it."""

    median: float
    lower: float
    upper: float
    rounds: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Timing":
        """Return the timing of at least two samples."""
        lower, median, upper = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, lower, upper, len(samples))


@dataclass(frozen=True)
class Measurement:
    """The timings of one case by provider name, how they were taken, and what did not run."""

    method: str
    other_cores: float  # cores that other processes kept busy meanwhile
    timings: dict[str, Timing]
    skipped: dict[str, str]
    failed: dict[str, str]
    peaks: dict[str, int] = field(default_factory=dict)  # peak bytes, if they were measured


def cache_bytes(device: torch.device) -> int:
    """Return the size of the last cache between `device` and its memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    try:
        with open("/sys/devices/system/cpu/cpu0/cache/index3/size") as file:
            return int(file.read().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return DEFAULT_CACHE_BYTES


def cache_flusher(device: torch.device) -> Callable[[], None]:
    """Return a function that evicts every input from the cache by reading other memory.

    It reads and does not write, since a written buffer would leave dirty lines, whose write-back
    would be charged to the operation that evicts them.
    """
    buffer = torch.ones(FLUSH_FACTOR * cache_bytes(device) // 4, device=device)
    total = torch.empty((), device=device)

    def flush() -> None:
        torch.sum(buffer, dim=0, out=total)

    return flush


def heap_trimmer() -> Callable[[], object]:
    """Return a function that returns freed memory to the system.

    Otherwise the next larger free() does this, most likely in the next provider's run. It takes
    15 ms for the 256 MiB of temporaries that one run leaves behind.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc's
    except AttributeError:
        return lambda: None
    return lambda: trim(0)


def cpu_clock(flush: Callable[[], None]) -> Clock:
    trim_heap = heap_trimmer()

    def seconds(provider: Provider) -> float:
        provider.restore()
        trim_heap()
        flush()
        start = perf_counter()
        provider.run()
        return perf_counter() - start

    return seconds


def cuda_clock(flush: Callable[[], None]) -> Clock:
    """Return a clock that uses device events around the run.

    Everything is queued before the host waits. Several flushes take a millisecond. They hide the
    time in which the host queues the start event and the run, as earlier work does in training.
    Only the host's time beyond that millisecond shows.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def seconds(provider: Provider) -> float:
        provider.restore()
        for _ in range(FLUSHES):
            flush()
        start.record()
        provider.run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    return seconds


def captured(provider: Provider) -> Provider:
    """Return the provider with its run replayed from a CUDA graph, without launch gaps."""
    graph = torch.cuda.CUDAGraph()
    provider.restore()
    with torch.cuda.graph(graph):
        provider.run()
    return replace(provider, run=graph.replay)


def interleaved(
    providers: Sequence[Provider],
    clock: Clock,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time every provider once per round; each round starts with the next provider.

    So a drift of clocks or a busy neighbour affects all of them alike.
    """
    samples: dict[str, list[float]] = {provider.name: [] for provider in providers}
    with no_garbage_collection():
        for index in range(rounds):
            first = index % max(len(providers), 1)
            for provider in (*providers[first:], *providers[:first]):
                samples[provider.name].append(clock(provider))
            tick()
    return {name: Timing.of(values) for name, values in samples.items()}


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, as timeit does.

    A collection is charged to the provider that allocates next, even if others left the garbage.
    With the compiler's objects in memory, it takes 15 ms, as long as the runs that are measured.
    """
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
