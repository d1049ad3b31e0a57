"""found_inf of multi_tensor_unscale and multi_tensor_unscale_norm: which values set it."""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_unscale, multi_tensor_unscale_norm
from reference import COMPLEX, DTYPES, REAL, heavy_tailed

NONFINITE = [math.nan, math.inf, -math.inf]
BOTH_OPS = pytest.mark.parametrize("unscale", [multi_tensor_unscale, multi_tensor_unscale_norm])


def flag_after(unscale, tensors, factor, flag=0.0):
    """Return found_inf after a call. It is `flag` before the call."""
    device = tensors[0].device
    found_inf = torch.tensor(flag, device=device)
    unscale(tensors, found_inf, torch.tensor(factor, device=device))
    return found_inf.item()


@BOTH_OPS
@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("element", [0, 4096, -1])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_single_nonfinite_element_anywhere_sets_the_flag(
    device, dtype, index, element, bad, unscale
):
    tensors = [heavy_tailed(8193, dtype, device, seed=i) for i in range(3)]
    tensors[index][element] = bad

    assert flag_after(unscale, tensors, 0.5) == 1


@BOTH_OPS
@pytest.mark.parametrize("bad", NONFINITE)
@pytest.mark.parametrize("dtype", COMPLEX)
def test_nonfinite_imaginary_part_sets_the_flag(device, dtype, bad, unscale):
    tensor = heavy_tailed(33, dtype, device)
    torch.view_as_real(tensor)[32, 1] = bad

    assert flag_after(unscale, [tensor], 0.5) == 1


@BOTH_OPS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.0, 0.5])
def test_infinity_sets_the_flag_whatever_the_factor(device, dtype, factor, unscale):
    tensor = heavy_tailed(8193, dtype, device)
    tensor[8192] = math.inf

    assert flag_after(unscale, [tensor], factor) == 1


@BOTH_OPS
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.float16, 60_000.0),
        (torch.bfloat16, 3e38),
        (torch.float32, 3e38),
        (torch.float64, 1.7e308),
        (torch.complex64, 3e38j),
        (torch.complex128, 1.7e308j),
    ],
)
@pytest.mark.parametrize("size", [1, 33, 8193])
def test_flag_is_set_by_a_finite_number_that_overflows(device, dtype, number, size, unscale):
    tensor = torch.ones(size, dtype=dtype, device=device)
    tensor[-1] = number

    assert flag_after(unscale, [tensor], 2.0) == 1
    assert not tensor[-1].isfinite()


@BOTH_OPS
def test_rounding_up_to_infinity_counts_as_overflow(device, unscale):
    # 65504 is float16's largest number; 65520 and more round to infinity.
    stays, overflows = (
        torch.tensor([number], dtype=torch.float16, device=device) for number in (65504.0, 65472.0)
    )

    assert flag_after(unscale, [stays], 1.0002) == 0
    assert flag_after(unscale, [overflows], 1.001) == 1


@BOTH_OPS
@pytest.mark.parametrize("dtype", REAL)
def test_largest_finite_numbers_do_not_set_the_flag(device, dtype, unscale):
    largest = torch.full((33,), torch.finfo(dtype).max, dtype=dtype, device=device)

    assert flag_after(unscale, [largest, -largest], 0.5) == 0


@BOTH_OPS
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_factor_that_is_not_finite_sets_the_flag(device, factor, unscale):
    assert flag_after(unscale, [torch.ones(3, device=device)], factor) == 1


@BOTH_OPS
@pytest.mark.parametrize("flag", [1.0, 2.0])
def test_flag_that_is_set_is_never_cleared(device, flag, unscale):
    assert flag_after(unscale, [torch.ones(3, device=device)], 0.5, flag) == flag


@BOTH_OPS
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_flag_stays_clear_for_tensors_without_elements(device, shape, unscale):
    assert flag_after(unscale, [torch.empty(shape, device=device)], math.inf) == 0


@BOTH_OPS
def test_memory_between_the_elements_of_a_view_does_not_set_the_flag(device, unscale):
    storage = torch.tensor([1.0, math.inf, 2.0, math.nan, 3.0], device=device)

    assert flag_after(unscale, [storage[::2]], 0.5) == 0
    assert storage[::2].tolist() == [0.5, 1.0, 1.5]


@BOTH_OPS
def test_flag_set_by_one_list_is_kept_by_the_next(device, unscale):
    found_inf, half = torch.zeros((), device=device), torch.tensor(0.5, device=device)

    unscale([torch.tensor([math.nan], device=device)], found_inf, half)
    unscale([torch.tensor([1.0], device=device)], found_inf, half)

    assert found_inf.item() == 1
