"""multi_tensor_unscale_norm equals multi_tensor_unscale followed by multi_tensor_norm."""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_norm, multi_tensor_unscale, multi_tensor_unscale_norm
from hypothesis import given, settings
from reference import (
    DTYPES,
    ORDERS,
    SIZES,
    VIEWS,
    assert_norm,
    heavy_tailed,
    mixture,
    mixtures,
    random_bits,
    same_bits,
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
    device = tensors[0].device if tensors else torch.device("cpu")
    found_inf, found_inf_of_two = torch.zeros(2, 1, device=device)
    factor = torch.tensor(factor, device=device)
    others = copies(tensors)
    multi_tensor_unscale(others, found_inf_of_two, factor)
    expected = multi_tensor_norm(others, ord)

    result = multi_tensor_unscale_norm(tensors, found_inf, factor, ord)

    for tensor, other in zip(tensors, others, strict=True):
        torch.testing.assert_close(tensor, other, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        result.total_norm, expected.total_norm, rtol=0, atol=0, equal_nan=True
    )
    torch.testing.assert_close(result.norms, expected.norms, rtol=0, atol=0, equal_nan=True)
    assert result.first_nonfinite.item() == expected.first_nonfinite.item()
    assert result.nonfinite_count.item() == expected.nonfinite_count.item()
    assert found_inf.item() == found_inf_of_two.item() == expected.found_inf.item()


@pytest.mark.sanitizer
@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_results_equal_unscale_followed_by_norm(device, dtype, ord, factor):
    tensors = [heavy_tailed(size, dtype, device, seed=size) for size in SIZES]

    assert_same_as_two_calls(tensors, factor, ord)


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_results_equal_two_calls_for_random_bits(device, dtype, ord, factor):
    tensors = [random_bits(8193, dtype, device), heavy_tailed(3, dtype, device)]

    assert_same_as_two_calls(tensors, factor, ord)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_equal_two_calls_for_every_memory_layout(device, dtype, name):
    assert_same_as_two_calls([view(name, dtype, device)], 1 / 3, 2.0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(recipe=mixtures)
@pytest.mark.parametrize("ord", ORDERS)
def test_results_equal_two_calls_for_mixed_dtypes_and_layouts(device, ord, recipe):
    assert_same_as_two_calls(mixture(recipe, device), 1 / 3, ord)


@pytest.mark.parametrize("factor", [2.0**-16, 3.0])
def test_norm_is_that_of_the_written_values(device, factor):
    tensors = [heavy_tailed(size, torch.float16, device, seed=size) for size in SIZES]

    result = multi_tensor_unscale_norm(
        tensors, torch.zeros((), device=device), torch.tensor(factor, device=device)
    )

    assert_norm(result.total_norm, tensors, 2.0)


def test_factor_one_leaves_every_bit_unchanged(device):
    for dtype in DTYPES:
        tensor = random_bits(8193, dtype, device)
        before = tensor.clone()

        multi_tensor_unscale_norm(
            [tensor], torch.zeros((), device=device), torch.ones((), device=device)
        )

        assert same_bits(tensor, before)


def test_overflow_of_a_product_is_counted_and_its_tensor_reported(device):
    tensors = [torch.ones(2, dtype=torch.float16, device=device) for _ in range(4)]
    tensors[1][0] = tensors[3][1] = 60_000
    found_inf = torch.zeros((), device=device)

    result = multi_tensor_unscale_norm(tensors, found_inf, torch.tensor(2.0, device=device))

    assert found_inf.item() == 1
    assert result.first_nonfinite.item() == 1
    assert result.nonfinite_count.item() == 2
    assert result.total_norm.item() == math.inf
    assert result.norms.isfinite().tolist() == [True, False, True, False]


def test_norm_too_large_for_float32_is_infinite_and_tensors_are_written(device):
    tensors = [torch.full((5,), 3e38, device=device), torch.ones(3, device=device)]
    found_inf = torch.zeros((), device=device)

    result = multi_tensor_unscale_norm(tensors, found_inf, torch.tensor(0.9, device=device))

    assert result.total_norm.item() == math.inf
    assert found_inf.item() == 0
    assert tensors[1].tolist() == [torch.tensor(0.9).item()] * 3


def test_empty_list_has_norm_zero_on_the_device_of_the_flag(device):
    found_inf = torch.zeros((), device=device)

    result = multi_tensor_unscale_norm([], found_inf, torch.tensor(0.5, device=device))

    assert result.total_norm.item() == 0
    assert result.norms.shape == (0,)
    assert result.first_nonfinite.item() == -1
    assert result.nonfinite_count.item() == 0
    assert {x.device.type for x in result} == {device.type}
    assert found_inf.item() == 0


@pytest.mark.parametrize("index", [1, 2])
def test_tensor_listed_twice_is_refused_and_nothing_is_written(device, index):
    tensors = [torch.full((3,), 4.0, device=device) for _ in range(3)]
    tensors[index] = tensors[0]
    found_inf = torch.zeros((), device=device)

    with pytest.raises(ValueError, match=rf"tensors\[{index}\].*tensors\[0\] again"):
        multi_tensor_unscale_norm(tensors, found_inf, torch.tensor(0.5, device=device))

    assert [tensor.tolist() for tensor in tensors] == [[4.0] * 3] * 3
    assert found_inf.item() == 0


def test_empty_tensors_may_be_listed_twice(device):
    empty, tensor = torch.empty(0, device=device), torch.full((1,), 4.0, device=device)

    multi_tensor_unscale_norm(
        [empty, tensor, empty], torch.zeros((), device=device), torch.tensor(0.5, device=device)
    )

    assert tensor.item() == 2.0
