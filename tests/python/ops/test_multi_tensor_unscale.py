"""multi_tensor_unscale: the values it writes, where it writes, and when it writes nothing."""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_unscale
from hypothesis import given, settings
from reference import (
    DTYPES,
    DTYPES_16_BIT,
    REAL,
    SIZES,
    VIEWS,
    bits,
    exact_product,
    heavy_tailed,
    mixture,
    mixtures,
    random_bits,
    same_bits,
    view,
)

# A power of two, as scales are; a factor with inexact products; a factor above 1. The product with
# numbers up to 1e4 never overflows float16.
FACTORS = [2.0**-16, 1 / 3, 5.3]


def scalar(value, device):
    return torch.tensor(value, dtype=torch.float32, device=device)


def unscale(tensors, factor, device):
    """Unscale with a flag of zero, and return the flag."""
    found_inf = scalar(0.0, device)
    multi_tensor_unscale(tensors, found_inf, scalar(factor, device))
    return found_inf.item()


@pytest.mark.sanitizer
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_the_exact_product_rounded(device, dtype, factor):
    tensors = [heavy_tailed(size, dtype, device, seed=size) for size in SIZES]
    expected = [exact_product(tensor, scalar(factor, device)) for tensor in tensors]

    flag = unscale(tensors, factor, device)

    assert all(map(same_bits, tensors, expected))
    assert flag == 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_tensor_is_written_to_its_end_and_not_beyond(device, dtype, size):
    storage = heavy_tailed(size + 2, dtype, device)
    before = storage.clone()

    unscale([storage[1:-1]], 0.5, device)

    assert same_bits(storage[1:-1], exact_product(before[1:-1], scalar(0.5, device)))
    assert same_bits(storage[0], before[0])
    assert same_bits(storage[-1], before[-1])


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_written_and_memory_between_their_elements_is_not(device, dtype, name):
    tensor = view(name, dtype, device)
    storage = tensor if tensor._base is None else tensor._base
    between = torch.ones_like(storage, dtype=torch.bool)
    between.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    before = storage.clone()
    expected = exact_product(tensor, scalar(1 / 3, device))

    unscale([tensor], 1 / 3, device)

    assert same_bits(tensor, expected)
    assert same_bits(storage[between], before[between])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(recipe=mixtures)
def test_lists_of_mixed_dtypes_and_layouts_are_unscaled(device, recipe):
    tensors = mixture(recipe, device)
    expected = [exact_product(tensor, scalar(1 / 3, device)) for tensor in tensors]

    flag = unscale(tensors, 1 / 3, device)

    assert all(map(same_bits, tensors, expected))
    assert flag == 0


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_every_16_bit_pattern_is_rounded_once(device, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    tensor = patterns.to(device).view(dtype)
    expected = exact_product(tensor, scalar(1 / 3, device))

    unscale([tensor], 1 / 3, device)

    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("dtype", "number", "factor"),
    [
        (torch.float16, 2.0**-14, 2.0**-10),  # smallest normal to smallest subnormal
        (torch.float16, 3 * 2.0**-24, 0.75),
        (torch.bfloat16, 2.0**-126, 2.0**-7),
        (torch.bfloat16, 1e-38, 0.1),
        (torch.float32, 2.0**-126, 2.0**-23),
        (torch.float32, 1e-40, 3.0),
        (torch.complex64, 1e-38, 0.1),
        (torch.float64, 2.0**-1022, 2.0**-52),
        (torch.float64, 1e-310, 0.5),
        (torch.float32, 1.0, 1e-40),  # the factor is subnormal
        (torch.bfloat16, 1.0, 1e-40),
    ],
)
def test_subnormal_numbers_survive(device, dtype, number, factor):
    tensor = torch.full((33,), number, dtype=dtype, device=device)
    expected = exact_product(tensor, scalar(factor, device))

    unscale([tensor], factor, device)

    assert bits(expected).count_nonzero() > 0
    assert same_bits(tensor, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factor_one_leaves_every_bit_unchanged(device, dtype):
    tensor = random_bits(8193, dtype, device)
    strided = torch.stack([tensor, tensor], dim=1)[:, 1]
    before = tensor.clone()

    unscale([tensor, strided], 1.0, device)

    assert same_bits(tensor, before)
    assert same_bits(strided, before)


@pytest.mark.parametrize(
    ("factor", "expected"),
    [
        (0.0, [0.0, 0.0, 0.0, math.nan, math.nan]),
        (math.inf, [math.inf, -math.inf, math.nan, math.inf, math.nan]),
        (math.nan, [math.nan] * 5),
        (-0.5, [-1.0, 1.0, 0.0, -math.inf, math.nan]),
    ],
)
@pytest.mark.parametrize("dtype", REAL)
def test_special_factors_act_as_in_a_multiplication(device, dtype, factor, expected):
    tensor = torch.tensor([2.0, -2.0, 0.0, math.inf, math.nan], dtype=dtype, device=device)

    unscale([tensor], factor, device)

    wanted = torch.tensor(expected, dtype=dtype, device=device)
    torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", REAL)
def test_zeros_have_the_sign_of_the_product(device, dtype):
    tensor = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype, device=device)

    unscale([tensor], 0.0, device)

    assert tensor.signbit().tolist() == [False, True, False, True]


def test_interleaved_views_are_multiplied_once_each(device):
    storage = torch.full((9,), 8.0, device=device)

    unscale([storage[::2], storage[1::2]], 0.5, device)

    assert storage.tolist() == [4.0] * 9


def test_empty_list_and_empty_tensors_set_no_flag(device):
    assert unscale([], 0.5, device) == 0
    assert (
        unscale([torch.empty(0, device=device), torch.empty(3, 0, device=device)], 0.5, device) == 0
    )


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scalars_may_have_any_shape_of_one_element(device, shape):
    tensor = torch.tensor([2.0, math.inf], device=device)
    found_inf = torch.zeros(shape, device=device)

    multi_tensor_unscale([tensor], found_inf, torch.full(shape, 0.5, device=device))

    assert tensor.tolist() == [1.0, math.inf]
    assert found_inf.item() == 1
