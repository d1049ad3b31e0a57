"""Cases for tests of the benchmark harness, which do nothing."""

import torch
from harness import OURS, Case, Provider, Traffic
from harness.machine import Machine

MACHINE = Machine("device", "2000 MHz", 2, "2.11.0", "", "0.1.0", "2026-01-01T00:00:00+00:00")


def nothing(): ...


IDLE = (Provider("torch", nothing), Provider(OURS, nothing))


def make_case(providers=IDLE, shape="4x1K", memory=0, quick=True):
    traffic = Traffic(read=8_000_000, written=4_000_000, against="update")
    setup = {"memory": memory, "setup": lambda _: providers, "quick": quick}
    return Case("clip", shape, torch.float32, 1_000_000, traffic, **setup)
