"""The benchmark harness: how it times, compares and weighs providers, and what it writes."""

import csv
import time
from dataclasses import replace

import harness.cli
import harness.console
import harness.plot
import pytest
import torch
from bench_cases import MACHINE, make_case, nothing
from harness import OURS, Products, Provider, timing
from harness.contention import CpuUse
from harness.measure import measure
from harness.memory import extra_peak
from harness.report import COLUMNS, Row, csv_file, remarks, rows_of, table_cells
from harness.timing import Measurement, Timing, cpu_clock, interleaved

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


def test_rates_are_the_floor_over_the_median_and_ratios_are_over_our_time():
    timings = {"torch": Timing(4e-3, 3e-3, 5e-3, 7), OURS: Timing(1e-3, 1e-3, 1e-3, 7)}
    measurement = Measurement("wall", 0.0, timings, skipped={}, failed={})
    ceilings = {"read": 1.0, "copy": 2.0, "update": 24.0}
    providers = [Provider("torch", nothing, moves=20.0), Provider(OURS, nothing)]
    peer, ours = rows_of(make_case(), providers, measurement, ceilings)
    # 8 MB are read and 4 MB written for a million elements. 12 MB move in 4 ms and in 1 ms.
    assert peer.bytes_per_element == 12.0
    assert (peer.moved_per_element, ours.moved_per_element) == (20.0, None)
    assert peer.gb_per_s == pytest.approx(3.0)
    assert peer.of_ceiling == pytest.approx(3.0 / 24.0)
    assert peer.time_over_ampfuse == pytest.approx(4.0)
    assert ours.gb_per_s == pytest.approx(12.0)
    assert ours.time_over_ampfuse == 1.0


def test_row_of_products_has_the_ceiling_of_its_dtype_and_the_peak_memory():
    timings = {OURS: Timing(2e-3, 1e-3, 3e-3, 7)}
    measurement = Measurement("wall", 0.0, timings, {}, {}, peaks={OURS: 3 * 2**20})
    case = replace(make_case(), traffic=Products(8_000_000, torch.bfloat16))
    ceilings = {"read": 1.0, torch.bfloat16: 16.0, torch.float32: 5.0}
    [row] = rows_of(case, [Provider(OURS, nothing)], measurement, ceilings)
    assert (row.gflop_per_s, row.ceiling_gflop_per_s) == (pytest.approx(4.0), 16.0)
    assert row.of_ceiling == pytest.approx(0.25)
    assert (row.gb_per_s, row.bytes_per_element, row.ceiling_gb_per_s) == (None, None, None)
    assert (row.ceiling, row.peak_mib) == ("product", 3.0)
    assert table_cells(row)[-5:] == ["", "4 GFLOP/s", "25%", "3", "1.00x"]


def test_csv_repeats_the_machine_on_every_row_and_leaves_unknown_numbers_empty(tmp_path):
    skipped = Row("clip", "4x1K", "float32", 4096, "torch.compile", "skipped: too many tensors")
    with csv_file(tmp_path / "rows.csv", MACHINE) as write:
        write([skipped])
        # The rows must be in the file before it is closed: a run may be cut short.
        written = (tmp_path / "rows.csv").read_text()
    [row] = csv.DictReader(written.splitlines())
    assert list(row) == COLUMNS
    assert COLUMNS[:6] == ["operation", "shape", "dtype", "elements", "provider", "status"]
    assert COLUMNS[-7:] == ["device", "clocks", "threads", "torch", "cuda", "ampfuse", "date"]
    assert row["status"] == "skipped: too many tensors"
    assert row["median_ms"] == ""
    assert row["device"] == "device"


def test_remarks_name_the_cases_that_were_skipped_or_are_doubtful():
    rows = [
        Row("clip", "4x1K", "float32", 1, "peer", "skipped: too long"),
        Row("norm", "4x1K", "float32", 1, "peer", "skipped: too long"),
        Row("norm", "4x1K", "float32", 1, OURS, "ok", median_ms=1.0, other_cores=0.9),
        Row("clip", "4x1K", "float32", 1, OURS, "ok", median_ms=1.0, other_cores=0.0),
    ]
    assert remarks(rows) == [
        "peer skipped: too long [clip/4x1K/float32, norm/4x1K/float32]",
        "doubtful: other processes kept over 0.2 cores busy [norm/4x1K/float32]",
    ]


def test_a_run_writes_table_csv_and_plot(run, tmp_path, capsys):
    status, rows = run([make_case()])
    assert status == 0
    assert [row["provider"] for row in rows] == ["torch", OURS]
    assert (tmp_path / "example.png").stat().st_size > 0
    assert "clip 4x1K float32" in capsys.readouterr().out


def test_a_failed_provider_fails_the_run_and_a_skipped_one_keeps_its_reason(run):
    def broken():
        raise RuntimeError("out of order")

    peer = Provider("peer", nothing, skipped="no such dtype")
    status, rows = run([make_case([Provider("torch", nothing), peer, Provider(OURS, broken)])])
    assert status == 1
    assert [row["status"] for row in rows] == [
        "ok",
        "skipped: no such dtype",
        "failed: RuntimeError: out of order",
    ]


def test_case_that_exceeds_memory_is_skipped_and_its_size_reported(run):
    status, rows = run([make_case(memory=2**60)])
    assert status == 0
    assert rows[0]["status"].startswith("skipped: needs 1073741824.0 GiB, ")


def test_interrupted_run_keeps_its_rows_and_lists_the_cases_it_lost(run):
    def interrupted():
        raise KeyboardInterrupt

    cases = [make_case(shape="first"), make_case([Provider(OURS, interrupted)], shape="second")]
    status, rows = run([*cases, make_case(shape="third")])
    assert status == 1
    assert [row["shape"] for row in rows] == ["first", "first", "second", "third"]
    assert [row["status"] for row in rows] == ["ok", "ok", *["skipped: interrupted"] * 2]


def test_quick_prints_the_cases_that_it_leaves_out(run, capsys):
    _, rows = run([make_case(shape="small"), make_case(shape="large", quick=False)], "--quick")
    assert {row["shape"] for row in rows} == {"small"}
    assert "--quick left out 1 cases: large/float32" in capsys.readouterr().out


def test_a_pattern_that_matches_nothing_lists_the_cases(run, capsys):
    status, _ = run([make_case()], "--cases", "norm/*")
    assert status == 2
    assert "clip/4x1K/float32" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--rounds", "2"], ["--threads", "0"], ["--device", "tpu"]])
def test_error_for_a_bad_argument_names_the_flag(flags, capsys):
    with pytest.raises(SystemExit):
        harness.cli.parse("example", flags)
    assert flags[0] in capsys.readouterr().err


def test_run_without_rich_and_matplotlib_warns_once_and_prints_plain_text(
    run, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(harness.console, "find_spec", lambda _: None)
    monkeypatch.setattr(harness.plot, "find_spec", lambda _: None)
    status, rows = run([make_case()])
    output = capsys.readouterr().out
    assert status == 0
    assert len(rows) == 2
    assert output.count("rich is not installed") == 1
    assert output.count("matplotlib is not installed") == 1
    assert "clip       4x1K float32" in output
    assert not (tmp_path / "example.png").exists()
