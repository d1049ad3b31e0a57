"""The benchmark harness for matrix products and memory: rates and peaks."""

from dataclasses import replace

import pytest
import torch
from harness import OURS, Products, Provider
from harness.case import Ceilings
from harness.measure import measure
from harness.memory import extra_peak
from harness.report import rows_of, table_cells
from harness.timing import Measurement, Timing
from test_harness import make_case, nothing


def test_row_of_products_has_the_ceiling_of_its_dtype_and_the_peak_memory() -> None:
    timings = {OURS: Timing(2e-3, 1e-3, 3e-3, 7)}
    measurement = Measurement("wall", 0.0, timings, {}, {}, peaks={OURS: 3 * 2**20})
    case = replace(make_case(), traffic=Products(8_000_000, torch.bfloat16))
    ceilings: Ceilings = {"read": 1.0, torch.bfloat16: 16.0, torch.float32: 5.0}

    [row] = rows_of(case, [Provider(OURS, nothing)], measurement, ceilings)

    assert (row.gflop_per_s, row.ceiling_gflop_per_s) == (pytest.approx(4.0), 16.0)
    assert row.of_ceiling == pytest.approx(0.25)
    assert (row.gb_per_s, row.bytes_per_element, row.ceiling_gb_per_s) == (None, None, None)
    assert (row.ceiling, row.peak_mib) == ("product", 3.0)
    assert table_cells(row)[-5:] == ["", "4 GFLOP/s", "25%", "3", "1.00x"]


def test_extra_peak_is_the_most_memory_held_at_one_time() -> None:
    def call() -> None:
        for _ in range(3):
            torch.ones(2**20).add(1)  # both tensors are held at once, then freed

    # Less than 256 bytes are a scalar or two.
    assert 0 <= extra_peak(torch.device("cpu"), call) - 2 * 4 * 2**20 < 256


def test_peak_memory_is_measured_only_on_request() -> None:
    provider = Provider("torch", lambda: torch.ones(2**20))

    def peaks(weighs_memory: bool) -> dict[str, int]:
        return measure([provider], torch.device("cpu"), 3, weighs_memory=weighs_memory).peaks

    assert peaks(True)["torch"] >= 4 * 2**20
    assert peaks(False) == {}


def test_what_a_provider_holds_between_runs_counts_as_its_memory() -> None:
    providers = [
        Provider("nothing held", nothing),
        Provider("a model held", nothing, held=lambda: 7 * 2**20),
    ]

    peaks = measure(providers, torch.device("cpu"), 3, weighs_memory=True).peaks

    assert peaks["a model held"] - peaks["nothing held"] == 7 * 2**20
