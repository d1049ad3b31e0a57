"""multi_tensor_norm: values, dtypes, memory layouts and sizes."""

import pytest
import torch
from ampfuse.ops import multi_tensor_norm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import (
    COMPLEX,
    EVERY_DTYPE,
    EVERY_ORDER,
    ORDERS,
    SIZES,
    VIEWS,
    assert_norm,
    heavy_tailed,
    mixture,
    mixtures,
    norm_dtype,
    view,
)


@pytest.mark.sanitizer
@pytest.mark.vectorised
@EVERY_ORDER
@EVERY_DTYPE
def test_norms_of_every_size_and_their_total_match_the_reference(device, dtype, ord):
    tensors = [heavy_tailed(size, dtype, device, seed=size) for size in SIZES]

    result = multi_tensor_norm(tensors, ord)

    for tensor, norm in zip(tensors, result.norms, strict=True):
        assert_norm(norm, [tensor], ord)
    assert_norm(result.total_norm, tensors, ord)
    assert result.found_inf.item() == 0
    assert result.first_nonfinite.item() == -1
    assert result.nonfinite_count.item() == 0


@pytest.mark.vectorised
@EVERY_DTYPE
def test_norm_of_every_memory_layout_matches_the_reference(device, dtype):
    for tensor in (view(name, dtype, device) for name in VIEWS):
        for ord in ORDERS:
            result = multi_tensor_norm([tensor], ord)

            assert_norm(result.total_norm, [tensor], ord)
            assert result.total_norm.dtype == result.norms.dtype == norm_dtype([tensor])
            assert result.norms.tolist() == [result.total_norm.item()]


def test_elements_that_share_memory_are_all_counted(device):
    expanded = heavy_tailed((7, 1), torch.float32, device).expand(7, 3)
    windows = heavy_tailed(9, torch.float32, device).as_strided((4, 3), (2, 1))

    for ord in ORDERS:
        result = multi_tensor_norm([expanded, windows], ord)

        assert_norm(result.norms[0], [expanded.clone()], ord)
        assert_norm(result.norms[1], [windows.clone()], ord)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_conjugate_and_negative_views_have_the_norm_of_their_values(device, dtype):
    numbers = heavy_tailed(33, dtype, device)

    result = multi_tensor_norm([numbers.conj(), numbers.conj().imag])

    assert_norm(result.norms[0], [numbers], 2.0)
    assert_norm(result.norms[1], [numbers.imag], 2.0)


@settings(
    max_examples=60,  # about 10 ms each
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(recipe=mixtures, ord=st.sampled_from([1, *ORDERS]))
def test_norm_of_mixed_dtypes_and_layouts_matches_the_reference(device, ord, recipe):
    tensors = mixture(recipe, device)

    result = multi_tensor_norm(tensors, ord)

    assert_norm(result.total_norm, tensors, ord)
    assert result.total_norm.dtype == result.norms.dtype == norm_dtype(tensors)
    for tensor, norm in zip(tensors, result.norms, strict=True):
        assert_norm(norm, [tensor], ord)
    assert result.found_inf.item() == 0


def test_results_have_the_documented_shapes_dtypes_and_device(device):
    result = multi_tensor_norm([torch.ones(4, device=device), torch.ones(2, 2, device=device)])

    assert {name: (tuple(x.shape), x.dtype) for name, x in result._asdict().items()} == {
        "total_norm": ((), torch.float32),
        "norms": ((2,), torch.float32),
        "found_inf": ((), torch.float32),
        "first_nonfinite": ((), torch.int64),
        "nonfinite_count": ((), torch.int64),
    }
    assert {x.device.type for x in result} == {device.type}


def test_empty_list_has_norm_zero_on_the_cpu():
    for ord in ORDERS:
        result = multi_tensor_norm([], ord)

        assert result.norms.shape == (0,)
        numbers = [x.item() for name, x in result._asdict().items() if name != "norms"]
        assert numbers == [0.0, 0.0, -1, 0]  # total norm, flag, first index and count
        assert {x.device.type for x in result} == {"cpu"}


# The arguments of a launch have room for 1476 tensors with two pointers each.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_of_more_tensors_than_fit_in_a_launch_matches_the_reference(device, dtype):
    tensors = [heavy_tailed(3, dtype, device, seed=index) for index in range(1500)]

    result = multi_tensor_norm(tensors)

    assert_norm(result.total_norm, tensors, 2.0)
    assert_norm(result.norms[1499], tensors[1499:], 2.0)
