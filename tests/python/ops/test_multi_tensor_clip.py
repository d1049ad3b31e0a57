"""multi_tensor_clip: the factor, the elements it multiplies, and when nothing is written."""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_clip
from hypothesis import given, settings
from reference import (
    COMPLEX,
    DTYPES,
    DTYPES_16_BIT,
    REAL,
    SIZES,
    VIEWS,
    heavy_tailed,
    mixture,
    mixtures,
    random_bits,
    real_parts,
    same_bits,
    view,
)

NORM_DTYPES = pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float64])


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
@NORM_DTYPES
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_scaled(device, dtype, norm_dtype):
    tensors = [heavy_tailed(size, dtype, device, seed=size) for size in SIZES]
    expected = [scaled(tensor, 7.0, 1.5) for tensor in tensors]

    multi_tensor_clip(tensors, torch.tensor(7.0, dtype=norm_dtype, device=device), 1.5)

    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_scaled(tensor, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("max_norm", [1e-3, 0.1, 1.0, 1e3])
def test_clipped_tensors_are_close_to_those_of_torch(device, dtype, max_norm):
    tensors = [heavy_tailed(size, dtype, device, seed=size) for size in (1, 33, 8193)]
    parameters = [torch.nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.grad = tensor.clone()
    total_norm = torch.nn.utils.get_total_norm(tensors)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm)

    multi_tensor_clip(tensors, total_norm, max_norm)

    # torch rounds a sum, a quotient and a product; 4 half bits cover these and our factor.
    for tensor, parameter in zip(tensors, parameters, strict=True):
        rtol = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(tensor, parameter.grad, rtol=rtol, atol=0)


def test_double_norm_gives_double_gradients_a_double_factor(device):
    tensor = torch.ones(3, dtype=torch.float64, device=device)

    multi_tensor_clip([tensor], torch.tensor(3.0, dtype=torch.float64, device=device), 1.0)

    assert tensor.tolist() == pytest.approx([1 / (3 + 1e-6)] * 3, rel=1e-15)


@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_16_bit_gradients_are_rounded_once(device, dtype):
    tensor = heavy_tailed(8193, dtype, device)
    # The factor is 1/3, since adding 1e-6 to this norm does not change it in float32.
    factor = torch.tensor(1e4 / (3e4 + 1e-6)).item()
    expected = (tensor.double() * factor).float().to(dtype)

    multi_tensor_clip([tensor], torch.tensor(3e4, device=device), 1e4)

    assert same_bits(tensor, expected)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_scaled_and_memory_between_their_elements_is_not(device, dtype, name):
    tensor = view(name, dtype, device)
    storage = tensor if tensor._base is None else tensor._base
    between = torch.ones_like(storage, dtype=torch.bool)
    between.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(False)
    before = storage.clone()
    expected = scaled(tensor, 7.0, 1.5)

    multi_tensor_clip([tensor], torch.tensor(7.0, device=device), 1.5)

    assert_scaled(tensor, expected)
    assert same_bits(storage[between], before[between])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(recipe=mixtures)
def test_lists_of_mixed_dtypes_and_layouts_are_scaled(device, recipe):
    tensors = mixture(recipe, device)
    expected = [scaled(tensor, 7.0, 1.5) for tensor in tensors]

    multi_tensor_clip(tensors, torch.tensor(7.0, device=device), 1.5)

    for tensor, wanted in zip(tensors, expected, strict=True):
        assert_scaled(tensor, wanted)


def test_empty_list_and_empty_tensors_are_accepted(device):
    total_norm = torch.tensor(5.0, device=device)

    multi_tensor_clip([], total_norm, 1.0)
    multi_tensor_clip(
        [torch.empty(0, device=device), torch.empty(3, 0, device=device)], total_norm, 1.0
    )


# Norms and limits for which the factor is 1. The last factor is rounded to 1 in float32.
AT_MOST_THE_LIMIT = [(0.0, 1.0), (0.5, 1.0), (5.0, math.inf), (0.0, 1e-6), (1e6, 1e6)]


@NORM_DTYPES
@pytest.mark.parametrize(("total_norm", "max_norm"), AT_MOST_THE_LIMIT)
@pytest.mark.parametrize("dtype", [*DTYPES_16_BIT, torch.float32, torch.complex64])
def test_factor_one_leaves_every_bit_unchanged(device, dtype, total_norm, max_norm, norm_dtype):
    tensor = random_bits(8193, dtype, device)
    strided = torch.stack([tensor, tensor], dim=1)[:, 1]
    before = tensor.clone()

    norm = torch.tensor(total_norm, dtype=norm_dtype, device=device)
    multi_tensor_clip([tensor, strided], norm, max_norm)

    assert same_bits(tensor, before)
    assert same_bits(strided, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_factor_one_leaves_every_bit_of_doubles_unchanged(device, dtype):
    tensor = random_bits(8193, dtype, device)
    before = tensor.clone()

    multi_tensor_clip([tensor], torch.tensor(0.5, device=device), 1.0)

    assert same_bits(tensor, before)


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


@NORM_DTYPES
@pytest.mark.parametrize(("total_norm", "max_norm", "expected"), SPECIAL)
@pytest.mark.parametrize("dtype", REAL)
def test_special_norms_and_limits_act_as_in_torch(
    device, dtype, total_norm, max_norm, expected, norm_dtype
):
    tensor = torch.tensor([2.0, -2.0, 0.0, math.inf, math.nan], dtype=dtype, device=device)
    parameter = torch.nn.Parameter(torch.zeros_like(tensor))
    parameter.grad = tensor.clone()
    norm = torch.tensor(total_norm, dtype=norm_dtype, device=device)
    torch.nn.utils.clip_grads_with_norm_([parameter], max_norm, norm)

    multi_tensor_clip([tensor], norm, max_norm)

    wanted = torch.tensor(expected, dtype=dtype, device=device)
    torch.testing.assert_close(tensor, wanted, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(tensor, parameter.grad, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_nan_norm_makes_both_parts_of_complex_numbers_nan(device, dtype):
    tensor = torch.ones(33, dtype=dtype, device=device)

    multi_tensor_clip([tensor], torch.tensor(math.nan, device=device), 1.0)

    assert real_parts(tensor).isnan().all()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_norm_may_have_any_shape_of_one_element(device, shape):
    tensor = torch.ones(2, device=device)

    multi_tensor_clip([tensor], torch.full(shape, 4e6, device=device), 1e6)

    assert tensor.tolist() == pytest.approx([0.25] * 2, rel=1e-6)


def test_norm_after_clipping_is_the_limit(device):
    tensors = [heavy_tailed(size, torch.float32, device, seed=size) for size in (33, 8193)]
    total_norm = torch.nn.utils.get_total_norm(tensors)

    multi_tensor_clip(tensors, total_norm, 2.0)

    assert torch.nn.utils.get_total_norm(tensors).item() == pytest.approx(2.0, rel=1e-5)
