"""Runs of benchmark cases in tests, through the command line of the harness."""

import csv
import gc

import harness.cli
import harness.timing
import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _short_collections():
    # Each case begins with collections of garbage, which look at all objects that are not frozen.
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _small_cache(monkeypatch):
    # Reading several times the last cache before each run would take most of the tests' time.
    monkeypatch.setattr(harness.timing, "cache_bytes", lambda _: 2**20)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs cases and returns the exit status and the rows of the CSV."""
    ceilings = {"read": 10.0, "copy": 10.0, "update": 20.0}
    ceilings |= {torch.bfloat16: 10.0, torch.float32: 10.0}
    monkeypatch.setattr(harness.cli, "measure_ceilings", lambda *_: ceilings)

    def run_cases(cases, *flags):
        flags = ("--device", "cpu", "--rounds", "3", "--out", str(tmp_path), *flags)
        status = harness.cli.main("example", cases, flags)
        path = tmp_path / "example.csv"
        rows = list(csv.DictReader(path.open())) if path.exists() else []
        return status, rows

    return run_cases
