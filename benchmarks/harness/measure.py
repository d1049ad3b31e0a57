"""Runs one case: warm-up, a check that the providers agree, the choice of a clock, the rounds."""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from harness.case import Provider
from harness.contention import CpuUse
from harness.memory import extra_peak
from harness.timing import (
    GRAPH_BELOW_SECONDS,
    WARM_UPS,
    Clock,
    Measurement,
    cache_flusher,
    captured,
    cpu_clock,
    cuda_clock,
    interleaved,
)

HEAD = 1024  # elements compared at the start of each returned and of two mutated tensors


def outcome(provider: Provider) -> list[torch.Tensor]:
    """Run `provider` on fresh inputs, and return a sample of its results, copied in float64."""
    provider.restore()
    returned = provider.run()
    ends = [provider.mutates[0], provider.mutates[-1]] if provider.mutates else []
    results = returned if isinstance(returned, tuple) else (returned,)
    tensors = [result for result in (*results, *ends) if isinstance(result, torch.Tensor)]
    heads = [tensor.detach().flatten()[:HEAD] for tensor in tensors]
    return [head.to("cpu", torch.float64, copy=True) for head in heads]


def disagreement(
    result: list[torch.Tensor], reference: list[torch.Tensor], provider: Provider
) -> str:
    """Return how `result` differs from the reference, or an empty string."""
    if len(result) != len(reference):
        return f"gave {len(result)} results where the reference gave {len(reference)}"
    for index, (got, expected) in enumerate(zip(result, reference, strict=True)):
        largest = expected.abs().max().item() if provider.slack else 0.0
        tolerance = {"rtol": provider.agreement, "atol": provider.slack * largest}
        if not torch.allclose(got, expected, **tolerance, equal_nan=True):
            return f"result {index} differs from the reference's"
    return ""


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def warm_up(
    providers: Sequence[Provider], failed: dict[str, str], report: Callable[[str], None]
) -> list[Provider]:
    """Return the providers that run and agree with the first one; put the others into `failed`."""
    ready: list[Provider] = []
    reference: list[torch.Tensor] | None = None
    for provider in providers:
        report(f"{provider.name}: warm-up")
        try:
            for _ in range(WARM_UPS):
                result = outcome(provider)
        except Exception as error:  # one competitor's failure is a result, not the end of the run
            failed[provider.name] = first_line(error)
            continue
        reference = result if reference is None else reference
        if difference := disagreement(result, reference, provider):
            failed[provider.name] = difference
        else:
            ready.append(provider)
    return ready


def device_clock(
    providers: list[Provider], device: torch.device
) -> tuple[str, Clock, list[Provider]]:
    """Return the method's name, the clock, and the providers as that method runs them.

    If one provider is so short that launch gaps show, all providers are replayed from CUDA graphs,
    so that the ratios are fair. If one of them cannot be captured, the whole case is timed by
    events, and the method's name reports this.
    """
    flush = cache_flusher(device)
    if device.type != "cuda":
        return "wall", cpu_clock(flush), providers
    clock = cuda_clock(flush)
    trial = [median(clock(provider) for _ in range(WARM_UPS)) for provider in providers]
    if not trial or min(trial) >= GRAPH_BELOW_SECONDS:
        return "events", clock, providers
    replayed: list[Provider] = []
    for provider in providers:
        try:
            replayed.append(captured(provider))
        except RuntimeError:
            return f"events ({provider.name} can't be captured)", clock, providers
    return "graph", clock, replayed


def peaks_of(providers: Sequence[Provider], device: torch.device) -> dict[str, int]:
    peaks = {}
    for provider in providers:
        provider.restore()
        peaks[provider.name] = provider.held() + extra_peak(device, provider.run)
    return peaks


def measure(
    providers: Sequence[Provider],
    device: torch.device,
    rounds: int,
    tick: Callable[[], None] = lambda: None,
    report: Callable[[str], None] = lambda _: None,
    *,
    weighs_memory: bool = False,
) -> Measurement:
    """Time the providers of one case. `tick` is called once per round, `report` at each stage."""
    skipped = {provider.name: provider.skipped for provider in providers if provider.skipped}
    failed: dict[str, str] = {}
    runnable = [provider for provider in providers if not provider.skipped]
    ready = warm_up(runnable, failed, report)
    peaks = peaks_of(ready, device) if weighs_memory else {}
    method, clock, ready = device_clock(ready, device)
    report("timing")
    start = CpuUse.now()
    timings = interleaved(ready, clock, rounds, tick)
    other_cores = CpuUse.now().other_cores_since(start)
    return Measurement(method, other_cores, timings, skipped, failed, peaks)
