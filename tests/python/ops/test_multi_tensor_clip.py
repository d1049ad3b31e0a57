"""multi_tensor_clip: the factor, the elements it multiplies, and when nothing is written."""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_clip
from reference import (
    COMPLEX,
    DTYPES,
    DTYPES_16_BIT,
    EVERY_DTYPE,
    REAL,
    SIZES,
    VIEWS,
    heavy_tailed,
    memory_between,
    random_bits,
    real_parts,
    same_bits,
    view,
)

NORM_DTYPES = [torch.float32, torch.float64]


def scaled(tensor, total_norm, max_norm):
    """Return tensor · min(1, max_norm / (total_norm + 1e-6)) in float64."""
    factor = min(1.0, max_norm / (total_norm + 1e-6))
    return real_parts(tensor).double() * factor


def assert_scaled(tensor, expected):
    """Check that the error is at most the last bit, or one step of subnormal numbers.

    The factor is rounded to float32, and the product is rounded once more: half a bit each.
    """
    info = torch.finfo(tensor.dtype)
    step = info.smallest_normal * info.eps
    torch.testing.assert_close(real_parts(tensor).double(), expected, rtol=info.eps, atol=step)


@pytest.mark.sanitizer
@pytest.mark.vectorised
@pytest.mark.parametrize("norm_dtype", NORM_DTYPES)
@EVERY_DTYPE
def test_every_element_is_scaled(device, dtype, norm_dtype):
    tensors = [heavy_tailed(size, dtype, device, seed=size) for size in SIZES]
    expected = [scaled(tensor, 7.0, 1.5) for tensor in tensors]

    multi_tensor_clip(tensors, torch.tensor(7.0, dtype=norm_dtype, device=device), 1.5)

    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_scaled(tensor, wanted)


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_16_bit_gradients_are_rounded_once(device, dtype):
    tensor = heavy_tailed(8193, dtype, device)
    # The factor is 1/3, since adding 1e-6 to this norm does not change it in float32.
    factor = torch.tensor(1e4 / (3e4 + 1e-6)).item()
    expected = (tensor.double() * factor).float().to(dtype)

    multi_tensor_clip([tensor], torch.tensor(3e4, device=device), 1e4)

    assert same_bits(tensor, expected)


def test_mixed_views_are_scaled_and_memory_between_their_elements_is_not(device):
    tensors = [view(name, dtype, device) for name in VIEWS for dtype in DTYPES]
    storages = [memory_between(tensor) for tensor in tensors]
    before = [storage.clone() for storage, _ in storages]
    expected = [scaled(tensor, 7.0, 1.5) for tensor in tensors]

    multi_tensor_clip(tensors, torch.tensor(7.0, device=device), 1.5)

    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_scaled(tensor, wanted)
    for (storage, between), old in zip(storages, before, strict=True):
        assert same_bits(storage[between], old[between])


def test_empty_list_and_empty_tensors_are_accepted(device):
    total_norm = torch.tensor(5.0, device=device)

    multi_tensor_clip([], total_norm, 1.0)
    empty = [torch.empty(0, device=device), torch.empty(3, 0, device=device)]
    multi_tensor_clip(empty, total_norm, 1.0)


# Norms and limits for which the factor is 1. The last factor is rounded to 1 in float32.
AT_MOST_THE_LIMIT = [(0.0, 1.0), (0.5, 1.0), (5.0, math.inf), (0.0, 1e-6), (1e6, 1e6)]


@pytest.mark.vectorised
@EVERY_DTYPE
def test_factor_one_leaves_every_bit_unchanged(device, dtype):
    is_double = dtype in (torch.float64, torch.complex128)
    tensor = random_bits(8193, dtype, device)
    strided = torch.stack([tensor, tensor], dim=1)[:, 1]
    before = tensor.clone()
    for total_norm, max_norm in AT_MOST_THE_LIMIT[: -1 if is_double else None]:
        for norm_dtype in NORM_DTYPES:
            norm = torch.tensor(total_norm, dtype=norm_dtype, device=device)
            multi_tensor_clip([tensor, strided], norm, max_norm)

            assert same_bits(tensor, before), (total_norm, max_norm, norm_dtype)
            assert same_bits(strided, before), (total_norm, max_norm, norm_dtype)


# torch does the same: a NaN norm gives factor NaN, an infinite one gives 0, inf / inf gives NaN.
SPECIAL = [
    # total norm, limit, and the results for 2, -2, 0, inf and NaN
    (math.nan, 1.0, [math.nan] * 5),
    (math.nan, math.inf, [math.nan] * 5),
    (math.inf, 1.0, [0.0, 0.0, 0.0, math.nan, math.nan]),
    (math.inf, math.inf, [math.nan] * 5),
    (5.0, 0.0, [0.0, 0.0, 0.0, math.nan, math.nan]),
    (0.0, 0.0, [0.0, 0.0, 0.0, math.nan, math.nan]),
    (1e6, -2e6, [-4.0, 4.0, 0.0, -math.inf, math.nan]),
    (5.0, math.nan, [math.nan] * 5),
]


@pytest.mark.parametrize("norm_dtype", NORM_DTYPES)
@pytest.mark.parametrize("dtype", REAL)
def test_special_norms_and_limits_act_as_in_torch(device, dtype, norm_dtype):
    for total_norm, max_norm, expected in SPECIAL:
        tensor = torch.tensor([2.0, -2.0, 0.0, math.inf, math.nan], dtype=dtype, device=device)
        parameter = torch.nn.Parameter(torch.zeros_like(tensor))
        parameter.grad = tensor.clone()
        norm = torch.tensor(total_norm, dtype=norm_dtype, device=device)
        torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, norm)

        multi_tensor_clip([tensor], norm, max_norm)

        for wanted in (torch.tensor(expected, dtype=dtype, device=device), parameter.grad):
            torch.testing.assert_close(tensor, wanted, rtol=1e-6, atol=0, equal_nan=True)


def test_nan_norm_makes_both_parts_of_complex_numbers_nan(device):
    for dtype in COMPLEX:
        tensor = torch.ones(33, dtype=dtype, device=device)

        multi_tensor_clip([tensor], torch.tensor(math.nan, device=device), 1.0)

        assert real_parts(tensor).isnan().all()


def test_norm_may_have_any_shape_of_one_element(device):
    for shape in ((), (1,), (1, 1)):
        tensor = torch.ones(2, device=device)

        multi_tensor_clip([tensor], torch.full(shape, 4e6, device=device), 1e6)

        assert tensor.tolist() == pytest.approx([0.25] * 2, rel=1e-6)
