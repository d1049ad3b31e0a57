"""The benchmark harness: how it times providers, compares their results and weighs their memory."""

import time

import pytest
import torch
from bench_cases import nothing
from harness import Provider, timing
from harness.contention import CpuUse
from harness.measure import measure
from harness.memory import extra_peak
from harness.timing import Timing, cpu_clock, interleaved

CPU = torch.device("cpu")


def test_timing_is_the_median_and_the_quartiles_of_all_rounds():
    timing = Timing.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert timing == Timing(median=3.0, lower=2.0, upper=4.0, rounds=5)


def test_each_round_starts_with_the_next_provider():
    order = []

    def clock(provider):
        order.append(provider.name)
        return 1.0

    interleaved([Provider(name, nothing) for name in "abc"], clock, rounds=4)
    assert "".join(order) == "abcbcacababc"


def test_heap_is_trimmed_between_restore_and_the_timed_run(monkeypatch):
    calls = []
    monkeypatch.setattr(timing, "heap_trimmer", lambda: lambda: calls.append("trim"))
    provider = Provider("any", lambda: calls.append("run"), lambda: calls.append("restore"))
    cpu_clock(lambda: calls.append("flush"))(provider)
    assert calls == ["restore", "trim", "flush", "run"]


def test_restore_runs_before_every_run_and_is_not_timed():
    calls = []

    def restore():
        calls.append("restore")
        time.sleep(0.05)

    provider = Provider("slow to restore", lambda: calls.append("run"), restore)
    timing = interleaved([provider], cpu_clock(nothing), rounds=3)["slow to restore"]
    assert calls == ["restore", "run"] * 3
    assert timing.upper < 0.05


def test_a_provider_that_raises_is_reported_and_the_others_are_timed():
    def broken():
        raise ValueError("no such kernel\nand a second line")

    result = measure([Provider("broken", broken), Provider("fine", nothing)], CPU, rounds=3)
    assert result.failed == {"broken": "ValueError: no such kernel"}
    assert list(result.timings) == ["fine"]


@pytest.mark.parametrize("wrong", [1.05, float("nan"), float("inf")])
def test_a_provider_that_computes_something_else_is_not_timed(wrong):
    providers = [
        Provider("reference", lambda: torch.tensor(1.0)),
        Provider("rounds to 16 bits", lambda: torch.tensor(1.001, dtype=torch.bfloat16)),
        Provider("rough", lambda: torch.tensor(1.05), agreement=2**-4),  # its own
        Provider("wrong", lambda: torch.tensor(wrong)),
    ]
    result = measure(providers, CPU, rounds=3)
    assert result.failed == {"wrong": "result 0 differs from the reference's"}
    assert list(result.timings) == ["reference", "rounds to 16 bits", "rough"]


def test_tensor_that_a_provider_mutates_is_compared():
    tensor = torch.ones(4)

    def provider(name, value):
        return Provider(name, lambda: tensor.fill_(value), lambda: tensor.fill_(1), [tensor])

    result = measure([provider("reference", 2.0), provider("wrong", 3.0)], CPU, rounds=3)
    assert list(result.failed) == ["wrong"]


def test_each_tensor_of_a_returned_tuple_is_compared():
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    providers = [
        Provider("reference", lambda: (one, two)),
        Provider("wrong", lambda: (one, one)),
        Provider("short", lambda: (one,)),
    ]
    result = measure(providers, CPU, rounds=3)
    assert result.failed == {
        "wrong": "result 1 differs from the reference's",
        "short": "gave 1 results where the reference gave 2",
    }


@pytest.mark.needs_cuda
@pytest.mark.parametrize(
    ("elements", "method"),
    [(2**10, "graph"), (2**28, "events")],  # any GPU takes over 100 us to read 1 GiB
)
def test_short_kernels_are_replayed_from_a_graph_and_long_ones_timed_by_events(elements, method):
    tensor = torch.rand(elements, device="cuda")
    result = measure([Provider("sum", lambda: tensor.sum())], torch.device("cuda"), rounds=5)
    assert result.method == method
    assert (result.timings["sum"].median < 100e-6) == (method == "graph")


@pytest.mark.needs_cuda
def test_a_short_run_that_waits_for_the_device_keeps_the_case_on_events():
    tensor = torch.rand(1024, device="cuda")

    def waiting():
        total = tensor.sum()
        torch.cuda.current_stream().synchronize()
        return total

    providers = [Provider("sum", lambda: tensor.sum()), Provider("waiting", waiting)]
    result = measure(providers, torch.device("cuda"), rounds=5)
    assert result.method == "events (waiting can't be captured)"
    assert list(result.timings) == ["sum", "waiting"]


def test_work_of_other_processes_is_all_cpu_time_minus_our_own():
    start = CpuUse(wall=10.0, everyone=100.0, ours=5.0)
    end = CpuUse(wall=12.0, everyone=107.0, ours=8.0)
    assert end.other_cores_since(start) == pytest.approx(2.0)


def test_extra_peak_is_the_most_memory_held_at_one_time():
    def call():
        for _ in range(3):
            torch.ones(2**20).add(1)  # both tensors are held at once, then freed

    # Less than 256 bytes are a scalar or two.
    assert 0 <= extra_peak(CPU, call) - 2 * 4 * 2**20 < 256


def test_peak_memory_is_measured_on_request_and_includes_what_is_held_between_runs():
    holding = Provider("a model held", nothing, held=lambda: 7 * 2**20)
    providers = [Provider("nothing held", nothing), holding]
    peaks = measure(providers, CPU, 3, weighs_memory=True).peaks
    assert peaks["a model held"] - peaks["nothing held"] == 7 * 2**20
    assert measure(providers, CPU, 3, weighs_memory=False).peaks == {}
