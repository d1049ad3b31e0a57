"""multi_tensor_unscale_norm equals multi_tensor_unscale followed by multi_tensor_norm."""

import pytest
import torch
from ampfuse.ops import multi_tensor_norm, multi_tensor_unscale, multi_tensor_unscale_norm
from reference import (
    DTYPES,
    EVERY_DTYPE,
    EVERY_ORDER,
    SIZES,
    VIEWS,
    heavy_tailed,
    random_bits,
    view,
)


def copies(tensors):
    """Copy tensors into separate memory with the same layout and alignment."""
    return [
        x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())
        for x in tensors
    ]


def assert_same_as_two_calls(tensors, factor, ord):
    """Unscale `tensors` both ways, and compare all written and returned values."""
    device = tensors[0].device
    found_inf, found_inf_of_two = torch.zeros(2, 1, device=device)
    factor = torch.tensor(factor, device=device)
    others = copies(tensors)
    multi_tensor_unscale(others, found_inf_of_two, factor)
    expected = multi_tensor_norm(others, ord)

    result = multi_tensor_unscale_norm(tensors, found_inf, factor, ord)

    exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(tensors, others, **exactly)
    torch.testing.assert_close(result[:2], expected[:2], **exactly)
    assert result.first_nonfinite.item() == expected.first_nonfinite.item()
    assert result.nonfinite_count.item() == expected.nonfinite_count.item()
    assert found_inf.item() == found_inf_of_two.item() == expected.found_inf.item()


@pytest.mark.sanitizer
@pytest.mark.vectorised
@EVERY_ORDER
@EVERY_DTYPE
def test_results_equal_unscale_followed_by_norm(device, dtype, ord):
    for factor in (1.0, 1 / 3):
        tensors = [heavy_tailed(size, dtype, device, seed=size) for size in SIZES]

        assert_same_as_two_calls(tensors, factor, ord)


@pytest.mark.vectorised
@EVERY_ORDER
@EVERY_DTYPE
def test_results_equal_two_calls_for_random_bits(device, dtype, ord):
    for factor in (1.0, 0.5):
        tensors = [random_bits(8193, dtype, device), heavy_tailed(3, dtype, device)]

        assert_same_as_two_calls(tensors, factor, ord)


@EVERY_ORDER
def test_results_equal_two_calls_for_every_memory_layout(device, ord):
    tensors = [view(name, dtype, device) for name in VIEWS for dtype in DTYPES]

    assert_same_as_two_calls(tensors, 1 / 3, ord)


def test_results_equal_two_calls_if_a_product_or_the_norm_overflows(device):
    halves = [torch.ones(2, dtype=torch.float16, device=device) for _ in range(4)]
    halves[1][0] = halves[3][1] = 60_000
    large = [torch.full((5,), 3e38, device=device), torch.ones(3, device=device)]
    for tensors, factor in ((halves, 2.0), (large, 0.9)):
        assert_same_as_two_calls(tensors, factor, 2.0)


def test_empty_list_has_norm_zero_on_the_device_of_the_flag(device):
    found_inf = torch.zeros((), device=device)

    result = multi_tensor_unscale_norm([], found_inf, torch.tensor(0.5, device=device))

    assert result.total_norm.item() == 0
    assert result.norms.shape == (0,)
    assert result.first_nonfinite.item() == -1
    assert result.nonfinite_count.item() == 0
    assert {x.device.type for x in result} == {device.type}
    assert found_inf.item() == 0
