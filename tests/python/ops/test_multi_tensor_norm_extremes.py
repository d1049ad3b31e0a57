"""multi_tensor_norm: NaN and infinity, and finite values whose squares are out of range."""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_norm
from reference import COMPLEX, EVERY_DTYPE, EVERY_ORDER, ORDERS, REAL, assert_norm, heavy_tailed

pytestmark = pytest.mark.vectorised
EVERY_COMPLEX = pytest.mark.parametrize("dtype", COMPLEX)

NONFINITE = [math.nan, math.inf, -math.inf]


def clean_list(dtype, device):
    """Return finite tensors: longer than a chunk, shorter than a vector, and one full chunk."""
    return [heavy_tailed(size, dtype, device, seed=size) for size in (8193, 31, 8192)]


def flags(result):
    """Return the flag, the first index and the count, as numbers."""
    return result.found_inf.item(), result.first_nonfinite.item(), result.nonfinite_count.item()


@pytest.mark.parametrize("bad", NONFINITE)
@EVERY_DTYPE
def test_single_nonfinite_element_is_found_anywhere(device, dtype, bad):
    clean = clean_list(dtype, device)
    for index, tensor in enumerate(clean):
        for element in (0, len(tensor) // 2, -1):
            tensors = [*clean[:index], tensor.clone(), *clean[index + 1 :]]
            tensors[index][element] = bad

            result = multi_tensor_norm(tensors)

            assert flags(result) == (1, index, 1), element
            assert result.norms.isfinite().tolist() == [i != index for i in range(3)]
            assert repr(result.total_norm.item()) == repr(abs(bad))


@pytest.mark.sanitizer
@EVERY_ORDER
@EVERY_DTYPE
def test_nonfinite_tensors_are_counted_and_the_first_is_reported(device, dtype, ord):
    tensors = [heavy_tailed(33, dtype, device, seed=i) for i in range(40)]
    for index in (7, 8, 39):
        tensors[index][3:5] = math.inf  # two elements of one tensor count once

    assert flags(multi_tensor_norm(tensors, ord)) == (1, 7, 3)


def test_index_of_the_first_nonfinite_tensor_counts_empty_tensors(device):
    empty = torch.empty(0, device=device)
    bad = torch.tensor([math.nan], device=device)

    result = multi_tensor_norm([empty, torch.ones(3, device=device), empty, bad, empty, bad])

    assert flags(result) == (1, 3, 2)


@EVERY_ORDER
@EVERY_COMPLEX
def test_nonfinite_imaginary_part_is_found(device, dtype, ord):
    tensors = clean_list(dtype, device)
    for bad in NONFINITE:
        torch.view_as_real(tensors[2])[8191, 1] = bad

        result = multi_tensor_norm(tensors, ord)

        assert flags(result) == (1, 2, 1)
        assert not math.isfinite(result.total_norm.item())


@EVERY_ORDER
@EVERY_DTYPE
def test_norm_is_nan_if_a_list_has_both_nan_and_infinity(device, dtype, ord):
    # The two are in two lanes, in two chunks, or in two tensors.
    for places in ([(0, 0), (0, 40)], [(0, 0), (0, 8192)], [(0, 1), (2, 1)]):
        for pair in ((math.nan, math.inf), (math.inf, math.nan)):
            tensors = clean_list(dtype, device)
            for (index, element), bad in zip(places, pair, strict=True):
                tensors[index][element] = bad

            assert multi_tensor_norm(tensors, ord).total_norm.isnan(), (places, pair)


@EVERY_COMPLEX
def test_norm_is_nan_if_a_complex_number_has_both_nan_and_infinity(device, dtype):
    for parts in ((math.nan, math.inf), (math.inf, math.nan)):
        number = torch.complex(*torch.tensor(parts, dtype=torch.float64)).to(device, dtype)

        assert multi_tensor_norm([number.repeat(33)], 2.0).total_norm.isnan()


# Magnitudes whose squares are infinite, zero or subnormal in the dtype of the sum: fp32 on a GPU
# for numbers of at most 32 bits, double for all others and on the CPU.
OUT_OF_RANGE = [
    *((torch.bfloat16, x) for x in (1e30, 1e-30, 1e-39)),
    (torch.float16, 2.0**-24),  # the smallest float16
    *((torch.float32, x) for x in (1e30, 1e-19, 1e-22, 1e-30, 1e-40, 2.0**-149)),
    *((torch.complex64, x) for x in (1e30, 1e-30, 1e-40)),
    *((torch.float64, x) for x in (1e200, 1e-153, 1e-160, 1e-200, 1e-310, 2.0**-1074)),
    *((torch.complex128, x) for x in (1e200, 1e-160, 1e-200, 1e-310)),
]


@pytest.mark.parametrize(("dtype", "magnitude"), OUT_OF_RANGE)
def test_norm_matches_the_reference_if_squares_are_out_of_range(device, dtype, magnitude):
    # The elements are 0 to 3 times the magnitude, so sums are rounded like those of integers.
    counts = torch.arange(8193, dtype=torch.float64) % 4
    tensors = [(counts * magnitude).to(device, dtype), torch.zeros(5, dtype=dtype, device=device)]

    for ord in ORDERS:
        result = multi_tensor_norm(tensors, ord)

        assert result.total_norm.item() > 0
        assert_norm(result.total_norm, tensors, ord)
        assert result.found_inf.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_norm_of_large_and_tiny_values_matches_the_reference(device, dtype):
    large, small = (1e200, 1e-200) if dtype == torch.float64 else (1e30, 1e-30)
    tensors = [
        torch.full((8193,), small, dtype=dtype, device=device),
        torch.full((33,), large, dtype=dtype, device=device),
        torch.tensor([small, large, small], dtype=dtype, device=device),
    ]

    for ord in ORDERS:
        result = multi_tensor_norm(tensors, ord)

        for norm, tensor in zip(result.norms, tensors, strict=True):
            assert_norm(norm, [tensor], ord)
        assert_norm(result.total_norm, tensors, ord)


@pytest.mark.parametrize("dtype", [*REAL[1:], *COMPLEX])  # float16 is too small for that
def test_norm_too_large_for_its_dtype_is_infinite_but_sets_no_flag(device, dtype):
    largest = torch.full((5,), torch.finfo(dtype).max, dtype=dtype, device=device)

    for ord in (1.0, 2.0):
        result = multi_tensor_norm([largest, largest], ord)

        assert result.total_norm.item() == math.inf
        assert result.norms.tolist() == [math.inf, math.inf]
        assert flags(result) == (0, -1, 0)


@EVERY_COMPLEX
def test_finite_complex_number_of_infinite_magnitude_sets_no_flag(device, dtype):
    largest = torch.finfo(dtype).max
    number = torch.complex(*torch.tensor([largest, largest], dtype=torch.float64))

    for size in (1, 33):
        for ord in ORDERS:
            result = multi_tensor_norm([number.to(device, dtype).repeat(size)], ord)

            assert result.total_norm.item() == math.inf
            assert result.found_inf.item() == 0


@pytest.mark.parametrize("dtype", REAL)
def test_largest_number_of_a_dtype_is_its_own_norm(device, dtype):
    largest = torch.tensor([torch.finfo(dtype).max, 0], dtype=dtype, device=device)

    assert multi_tensor_norm([largest]).total_norm.item() == torch.finfo(dtype).max


@EVERY_DTYPE
def test_norm_of_zeros_is_exactly_positive_zero(device, dtype):
    for zero in (0.0, -0.0):
        sizes = (0, 1, 33, 8193)
        tensors = [torch.full((size,), zero, dtype=dtype, device=device) for size in sizes]
        for ord in ORDERS:
            result = multi_tensor_norm(tensors, ord)

            assert {repr(norm.item()) for norm in (result.total_norm, *result.norms)} == {"0.0"}
            assert result.found_inf.item() == 0


@pytest.mark.parametrize("largest", [1e308, torch.finfo(torch.float64).max])
def test_norm_of_the_largest_doubles_survives_flushing_of_subnormals(largest):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        norm = multi_tensor_norm([torch.tensor([largest, 1.0], dtype=torch.float64)]).total_norm
    finally:
        torch.set_flush_denormal(False)

    assert norm.item() == pytest.approx(largest, rel=1e-15)
