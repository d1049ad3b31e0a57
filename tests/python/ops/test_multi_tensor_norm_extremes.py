"""multi_tensor_norm: NaN and infinity, and finite values whose squares are out of range."""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_norm
from reference import COMPLEX, DTYPES, ORDERS, REAL, assert_norm, heavy_tailed

NONFINITE = [math.nan, math.inf, -math.inf]


def clean_list(dtype, device):
    """Return finite tensors: longer than a chunk, shorter than a vector, and one full chunk."""
    return [heavy_tailed(size, dtype, device, seed=size) for size in (8193, 31, 8192)]


@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("element", ["first", "middle", "last"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_nonfinite_element_is_found_anywhere(device, dtype, index, element, bad):
    tensors = clean_list(dtype, device)
    tensors[index][{"first": 0, "middle": len(tensors[index]) // 2, "last": -1}[element]] = bad

    result = multi_tensor_norm(tensors)

    assert result.found_inf.item() == 1
    assert result.first_nonfinite.item() == index
    assert result.nonfinite_count.item() == 1
    assert result.norms.isfinite().tolist() == [i != index for i in range(3)]
    expected = torch.tensor(abs(bad), dtype=result.total_norm.dtype)
    torch.testing.assert_close(result.total_norm.cpu(), expected, equal_nan=True)


@pytest.mark.sanitizer
@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nonfinite_tensors_are_counted_and_the_first_is_reported(device, dtype, ord):
    tensors = [heavy_tailed(33, dtype, device, seed=i) for i in range(40)]
    for index in (7, 8, 39):
        tensors[index][3:5] = math.inf  # two elements of one tensor count once

    result = multi_tensor_norm(tensors, ord)

    assert result.found_inf.item() == 1
    assert result.first_nonfinite.item() == 7
    assert result.nonfinite_count.item() == 3


def test_index_of_the_first_nonfinite_tensor_counts_empty_tensors(device):
    empty = torch.empty(0, device=device)
    bad = torch.tensor([math.nan], device=device)

    result = multi_tensor_norm([empty, torch.ones(3, device=device), empty, bad, empty, bad])

    assert result.first_nonfinite.item() == 3
    assert result.nonfinite_count.item() == 2


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_list_sets_no_flag(device, dtype, ord):
    result = multi_tensor_norm(clean_list(dtype, device), ord)

    assert result.found_inf.item() == 0
    assert result.first_nonfinite.item() == -1
    assert result.nonfinite_count.item() == 0


@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", COMPLEX)
def test_nonfinite_imaginary_part_is_found(device, dtype, ord, bad):
    tensors = clean_list(dtype, device)
    torch.view_as_real(tensors[2])[8191, 1] = bad

    result = multi_tensor_norm(tensors, ord)

    assert result.found_inf.item() == 1
    assert result.first_nonfinite.item() == 2
    assert not math.isfinite(result.total_norm.item())


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", [(math.nan, math.inf), (math.inf, math.nan)])
@pytest.mark.parametrize("indices", [((0, 0), (0, 40)), ((0, 0), (0, 8192)), ((0, 1), (2, 1))])
def test_norm_is_nan_if_a_list_has_both_nan_and_infinity(device, dtype, ord, pair, indices):
    tensors = clean_list(dtype, device)
    for (index, element), bad in zip(indices, pair, strict=True):
        tensors[index][element] = bad

    assert multi_tensor_norm(tensors, ord).total_norm.isnan()


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("parts", [(math.nan, math.inf), (math.inf, math.nan)])
def test_norm_is_nan_if_a_complex_number_has_both_nan_and_infinity(device, dtype, parts):
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


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize(("dtype", "magnitude"), OUT_OF_RANGE)
def test_norm_matches_the_reference_if_squares_are_out_of_range(device, dtype, magnitude, ord):
    # The elements are 0 to 3 times the magnitude, so sums are rounded like those of integers.
    counts = torch.arange(8193, dtype=torch.float64) % 4
    tensors = [(counts * magnitude).to(device, dtype), torch.zeros(5, dtype=dtype, device=device)]

    result = multi_tensor_norm(tensors, ord)

    assert result.total_norm.item() > 0
    assert_norm(result.total_norm, tensors, ord)
    assert result.found_inf.item() == 0


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize(
    ("dtype", "large", "small"),
    [
        (torch.float32, 1e30, 1e-30),
        (torch.bfloat16, 1e30, 1e-30),
        (torch.float64, 1e200, 1e-200),
    ],
)
def test_norm_of_large_and_tiny_values_matches_the_reference(device, dtype, large, small, ord):
    tensors = [
        torch.full((8193,), small, dtype=dtype, device=device),
        torch.full((33,), large, dtype=dtype, device=device),
        torch.tensor([small, large, small], dtype=dtype, device=device),
    ]

    result = multi_tensor_norm(tensors, ord)

    for norm, tensor in zip(result.norms, tensors, strict=True):
        assert_norm(norm, [tensor], ord)
    assert_norm(result.total_norm, tensors, ord)


@pytest.mark.parametrize("ord", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [*REAL[1:], *COMPLEX])  # float16 is too small for that
def test_norm_too_large_for_its_dtype_is_infinite_but_sets_no_flag(device, dtype, ord):
    largest = torch.full((5,), torch.finfo(dtype).max, dtype=dtype, device=device)

    result = multi_tensor_norm([largest, largest], ord)

    assert result.total_norm.item() == math.inf
    assert result.norms.tolist() == [math.inf, math.inf]
    assert result.found_inf.item() == 0
    assert result.first_nonfinite.item() == -1
    assert result.nonfinite_count.item() == 0


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("size", [1, 33])
def test_finite_complex_number_of_infinite_magnitude_sets_no_flag(device, dtype, ord, size):
    largest = torch.finfo(dtype).max
    number = torch.complex(*torch.tensor([largest, largest], dtype=torch.float64))

    result = multi_tensor_norm([number.to(device, dtype).repeat(size)], ord)

    assert result.total_norm.item() == math.inf
    assert result.found_inf.item() == 0


@pytest.mark.parametrize("dtype", REAL)
def test_largest_number_of_a_dtype_is_its_own_norm(device, dtype):
    largest = torch.tensor([torch.finfo(dtype).max, 0], dtype=dtype, device=device)

    assert multi_tensor_norm([largest]).total_norm.item() == torch.finfo(dtype).max


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_norm_of_zeros_is_exactly_positive_zero(device, dtype, ord, zero):
    tensors = [torch.full((size,), zero, dtype=dtype, device=device) for size in (1, 33, 8193)]

    result = multi_tensor_norm(tensors, ord)

    for norm in (result.total_norm, *result.norms):
        assert norm.item() == 0
        assert not norm.signbit()
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
