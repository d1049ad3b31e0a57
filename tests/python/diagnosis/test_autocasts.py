"""Autocasts that change nothing, and float16 where it is slow or not scaled, are noticed."""

from contextlib import ExitStack

import pytest
import torch
from ampfuse.tools.diagnosis import autocasts
from ampfuse.tools.diagnosis.autocasts import Autocasts


@pytest.fixture
def made():
    with ExitStack() as exits:
        yield Autocasts(exits)


@pytest.mark.filterwarnings("ignore:In CPU autocast")
def test_region_without_autocast_and_a_dtype_that_is_not_supported_are_not_described(made):
    torch.autocast("cpu", enabled=False)
    torch.autocast("cpu", torch.float32)
    assert made.describe(torch.float32) is None


def test_autocast_for_a_gpu_that_is_missing_is_described(made, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="CUDA is not available") as caught:
        torch.autocast("cuda")
    assert [warning.filename for warning in caught] == [__file__]
    expected = 'torch.autocast("cuda") does nothing on a CPU: this trained in float32'
    assert made.describe(torch.float32) == expected
    torch.autocast("cpu", torch.bfloat16)
    assert made.describe(torch.float32) is None


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float16, 1), (torch.bfloat16, 0)])
def test_float16_without_a_scaler_is_noticed(made, monkeypatch, dtype, expected):
    for name in ("time_product", "time_convolution"):
        monkeypatch.setattr(autocasts, name, lambda dtype: 1.0)
    with torch.no_grad():
        torch.autocast("cpu", dtype)
    assert [*made.explain_float16(has_scaler=False)] == []
    torch.autocast("cpu", dtype)
    assert len([*made.explain_float16(has_scaler=False)]) == expected
    assert [*made.explain_float16(has_scaler=True)] == []


@pytest.mark.parametrize(
    ("bfloat16", "float32", "is_slow"), [(1.0, 5.0, True), (1.0, 10.0, False), (9.0, 1.0, False)]
)
@pytest.mark.parametrize("is_product", [True, False])
def test_cpu_that_is_slow_in_float16_is_noticed(
    made, monkeypatch, is_product, bfloat16, float32, is_slow
):
    times = {torch.float16: 15.0, torch.bfloat16: bfloat16, torch.float32: float32}
    monkeypatch.setattr(autocasts, "time_product", times.__getitem__ if is_product else lambda _: 1)
    monkeypatch.setattr(autocasts, "time_convolution", times.__getitem__)
    convolution = torch.nn.Conv2d(1, 1, 1)
    assert autocasts.has_convolutions()
    monkeypatch.setattr(autocasts, "has_convolutions", lambda: convolution and not is_product)
    assert [*made.explain_float16(has_scaler=True)] == []  # it is not used
    torch.autocast("cpu", torch.float16)
    hints = [*made.explain_float16(has_scaler=True)]
    assert ["15 times as long as in bfloat16" in hint for hint in hints] == [True] * is_slow
