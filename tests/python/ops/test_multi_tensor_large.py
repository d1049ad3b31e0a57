"""Tensors of more than 2³¹ elements, and strides as large: the ops reach the last elements."""

import math

import pytest
import torch
from ampfuse.ops import multi_tensor_clip, multi_tensor_norm, multi_tensor_unscale_norm
from reference import free_gib

pytestmark = pytest.mark.slow

# A chunk and one element more than a 32-bit index can address: 4.3 GB as bfloat16.
SIZE = 2**31 + 8193
# Elements set to 1, 2, 4 and 8: the sixth, both sides of the 32-bit limit, and the last.
MARKS = [5, 2**31 - 1, 2**31, SIZE - 1]


@pytest.fixture
def marked(device):
    """Return a tensor that is zero except at its four marks."""
    if free_gib(device) < 12:
        pytest.skip(f"needs 12 GiB of free memory on {device.type}")
    tensor = torch.zeros(SIZE, dtype=torch.bfloat16, device=device)
    tensor[MARKS] = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.bfloat16, device=device)
    return tensor


@pytest.mark.parametrize(("ord", "expected"), [(1.0, 15.0), (2.0, math.sqrt(85)), (math.inf, 8.0)])
def test_norm_includes_the_last_elements(marked, ord, expected):
    result = multi_tensor_norm([marked[:3], marked], ord)

    assert result.total_norm.item() == pytest.approx(expected, rel=1e-6)
    assert result.norms[0].item() == 0
    assert result.found_inf.item() == 0


def test_nonfinite_last_element_is_found(marked):
    marked[-1] = math.nan

    result = multi_tensor_norm([marked[:3], marked])

    assert result.found_inf.item() == 1
    assert result.first_nonfinite.item() == 1


def test_last_elements_are_unscaled_and_clipped(marked):
    device = marked.device
    found_inf, half = torch.zeros((), device=device), torch.tensor(0.5, device=device)

    result = multi_tensor_unscale_norm([marked], found_inf, half)
    multi_tensor_clip([marked], torch.tensor(2e6, device=device), 1e6)

    assert result.total_norm.item() == pytest.approx(math.sqrt(85) / 2, rel=1e-6)
    assert marked[MARKS].tolist() == [0.25, 0.5, 1.0, 2.0]
    assert marked.count_nonzero().item() == 4


def test_view_with_offsets_beyond_32_bits_is_unscaled(marked):
    far_apart = marked[:: 2**31]  # elements 0 and 2³¹
    found_inf = torch.zeros((), device=marked.device)

    multi_tensor_unscale_norm([far_apart], found_inf, torch.tensor(0.5, device=marked.device))

    assert marked[MARKS].tolist() == [1.0, 2.0, 2.0, 8.0]
