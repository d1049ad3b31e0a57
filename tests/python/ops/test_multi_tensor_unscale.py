"""multi_tensor_unscale: the values it writes, where it writes, and which values set found_inf.

Tests of the flag, of factor 1 and of lists without elements are also of multi_tensor_unscale_norm.
"""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_unscale, multi_tensor_unscale_norm
from reference import (
    COMPLEX,
    DTYPES,
    DTYPES_16_BIT,
    EVERY_DTYPE,
    REAL,
    SIZES,
    VIEWS,
    bits,
    exact_product,
    heavy_tailed,
    memory_between,
    random_bits,
    same_bits,
    scalar,
    view,
)

BOTH_OPS = pytest.mark.parametrize("op", [multi_tensor_unscale, multi_tensor_unscale_norm])
NONFINITE = [math.nan, math.inf, -math.inf]


def unscale(tensors, factor, device, op=multi_tensor_unscale, flag=0.0):
    """Call `op`, and return the flag, which is `flag` before the call."""
    found_inf = scalar(flag, device)
    op(tensors, found_inf, scalar(factor, device))
    return found_inf.item()


# A power of two, as scales are; a factor with inexact products; a factor above 1. The product with
# numbers up to 1e4 never overflows float16.
@pytest.mark.sanitizer
@pytest.mark.vectorised
@pytest.mark.parametrize("factor", [2.0**-16, 1 / 3, 5.3])
@EVERY_DTYPE
def test_every_element_is_the_exact_product_rounded(device, dtype, factor):
    tensors = [heavy_tailed(size, dtype, device, seed=size) for size in SIZES]
    expected = [exact_product(tensor, scalar(factor, device)) for tensor in tensors]

    flag = unscale(tensors, factor, device)

    assert all(map(same_bits, tensors, expected))
    assert flag == 0


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_tensor_is_written_to_its_end_and_not_beyond(device, dtype):
    for size in SIZES:
        storage = heavy_tailed(size + 2, dtype, device)
        before = storage.clone()

        unscale([storage[1:-1]], 0.5, device)

        assert same_bits(storage[1:-1], exact_product(before[1:-1], scalar(0.5, device))), size
        assert same_bits(storage[0], before[0]), size
        assert same_bits(storage[-1], before[-1]), size


@pytest.mark.vectorised
def test_mixed_views_are_written_and_memory_between_their_elements_is_not(device):
    tensors = [view(name, dtype, device) for name in VIEWS for dtype in DTYPES]
    storages = [memory_between(tensor) for tensor in tensors]
    before = [storage.clone() for storage, _ in storages]
    expected = [exact_product(tensor, scalar(1 / 3, device)) for tensor in tensors]

    flag = unscale(tensors, 1 / 3, device)

    assert all(map(same_bits, tensors, expected))
    assert flag == 0
    for (storage, between), old in zip(storages, before, strict=True):
        assert same_bits(storage[between], old[between])


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_every_16_bit_pattern_is_rounded_once(device, dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    tensor = patterns.to(device).view(dtype)
    expected = exact_product(tensor, scalar(1 / 3, device))

    unscale([tensor], 1 / 3, device)

    torch.testing.assert_close(tensor, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.vectorised
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


@pytest.mark.vectorised
@BOTH_OPS
@EVERY_DTYPE
def test_factor_one_leaves_every_bit_unchanged(device, dtype, op):
    tensor = random_bits(8193, dtype, device)
    strided = torch.stack([tensor, tensor], dim=1)[:, 1]
    before = tensor.clone()

    unscale([tensor, strided], 1.0, device, op)

    assert same_bits(tensor, before)
    assert same_bits(strided, before)


@pytest.mark.vectorised
@pytest.mark.parametrize("factor", [0.0, math.inf, math.nan, -0.5])
def test_special_factors_act_as_in_a_multiplication(device, factor):
    numbers = [2.0, -2.0, 0.0, -0.0, math.inf, math.nan]
    for dtype in REAL:
        tensor = torch.tensor(numbers, dtype=dtype, device=device)

        unscale([tensor], factor, device)

        # The texts differ in the sign of zero, and two NaNs have the same text.
        assert list(map(repr, tensor.tolist())) == [repr(factor * x) for x in numbers], dtype


@BOTH_OPS
def test_lists_without_elements_set_no_flag(device, op):
    empty, grid = torch.empty(0, device=device), torch.empty(3, 0, device=device)
    for tensors in ([], [empty], [grid], [empty, grid]):
        assert unscale(tensors, math.inf, device, op) == 0


@BOTH_OPS
def test_scalars_may_have_any_shape_of_one_element(device, op):
    for shape in ((), (1,), (1, 1)):
        tensor = torch.tensor([2.0, math.inf], device=device)
        found_inf = torch.zeros(shape, device=device)

        op([tensor], found_inf, torch.full(shape, 0.5, device=device))

        assert tensor.tolist() == [1.0, math.inf]
        assert found_inf.item() == 1


@pytest.mark.vectorised
@BOTH_OPS
@EVERY_DTYPE
def test_single_nonfinite_element_anywhere_sets_the_flag(device, dtype, op):
    clean = [heavy_tailed(8193, dtype, device, seed=i) for i in range(3)]
    places = [(index, element) for index in range(3) for element in (0, 4096, -1)]
    for factor in (0.5, 1.0, 0.0):
        for index, element in places:
            for bad in NONFINITE:
                tensors = [x.clone() for x in clean]
                tensors[index][element] = bad

                flag = unscale(tensors, factor, device, op)

                assert flag == 1, (factor, index, element, bad)


@pytest.mark.vectorised
@BOTH_OPS
@pytest.mark.parametrize("dtype", COMPLEX)
def test_nonfinite_imaginary_part_sets_the_flag(device, dtype, op):
    for bad in NONFINITE:
        tensor = heavy_tailed(33, dtype, device)
        torch.view_as_real(tensor)[32, 1] = bad

        assert unscale([tensor], 0.5, device, op) == 1


OVERFLOWING = {  # when doubled
    torch.float16: 60_000.0,
    torch.bfloat16: 3e38,
    torch.float32: 3e38,
    torch.float64: 1.7e308,
    torch.complex64: 3e38j,
    torch.complex128: 1.7e308j,
}


@pytest.mark.vectorised
@BOTH_OPS
@EVERY_DTYPE
def test_flag_is_set_by_a_finite_number_that_overflows(device, dtype, op):
    for size in (1, 33, 8193):
        tensor = torch.ones(size, dtype=dtype, device=device)
        tensor[-1] = OVERFLOWING[dtype]

        assert unscale([tensor], 2.0, device, op) == 1, size
        assert not tensor[-1].isfinite()


@pytest.mark.vectorised
@BOTH_OPS
def test_rounding_up_to_infinity_counts_as_overflow(device, op):
    # 65504 is float16's largest number; 65520 and more round to infinity.
    stays, overflows = (
        torch.tensor([number], dtype=torch.float16, device=device) for number in (65504.0, 65472.0)
    )

    assert unscale([stays], 1.0002, device, op) == 0
    assert unscale([overflows], 1.001, device, op) == 1


@pytest.mark.vectorised
@BOTH_OPS
def test_largest_finite_numbers_do_not_set_the_flag(device, op):
    for dtype in REAL:
        largest = torch.full((33,), torch.finfo(dtype).max, dtype=dtype, device=device)

        assert unscale([largest, -largest], 0.5, device, op) == 0, dtype


@BOTH_OPS
def test_flag_is_set_by_a_factor_that_is_not_finite_and_is_never_cleared(device, op):
    for factor in (math.inf, math.nan):
        assert unscale([torch.ones(3, device=device)], factor, device, op) == 1
    for flag in (1.0, 2.0):
        assert unscale([torch.ones(3, device=device)], 0.5, device, op, flag) == flag


@BOTH_OPS
def test_memory_between_the_elements_of_a_view_does_not_set_the_flag(device, op):
    storage = torch.tensor([1.0, math.inf, 2.0, math.nan, 3.0], device=device)

    assert unscale([storage[::2]], 0.5, device, op) == 0
    assert storage[::2].tolist() == [0.5, 1.0, 1.5]
