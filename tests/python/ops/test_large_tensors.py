"""Tensors of more than 2³¹ elements, and strides as large: the ops reach the last elements."""

import math

import pytest
import torch
from adam_reference import AdamLists, step
from ampfuse.ops import multi_tensor_clip, multi_tensor_norm, multi_tensor_unscale_norm
from reference import free_gib

# A chunk and one element more than a 32-bit index can address: 4.3 GB as bfloat16.
SIZE = 2**31 + 8193
# Elements set to 1, 2, 4 and 8: the sixth, both sides of the 32-bit limit, and the last.
MARKS = [5, 2**31 - 1, 2**31, SIZE - 1]


# The small size checks the test itself on machines without memory for the large size.
@pytest.mark.parametrize("size", [3 * 2**16 + 8193, pytest.param(SIZE, marks=pytest.mark.slow)])
def test_adam_changes_exactly_the_elements_with_a_gradient(device, size):
    needed = 12 * size / 2**30
    if free_gib(device) < needed:
        pytest.skip(f"needs {needed:.0f} GiB of free memory on {device.type}")
    # One in the first chunk, two at 2³¹ − 1 and 2³¹ (for the large size), and the last element.
    marks = torch.tensor([5, size - 8194, size - 8193, size - 1], device=device)
    param, grad, exp_avg, exp_avg_sq = (
        torch.zeros(size, dtype=torch.bfloat16, device=device) for _ in range(4)
    )
    remainder = torch.zeros(size, dtype=torch.int16, device=device)
    grad[marks] = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.bfloat16, device=device)
    count = torch.zeros((), device=device)

    lists = AdamLists([param], [grad], [exp_avg], [exp_avg_sq], [], [count], [remainder])
    step(lists, lr=0.25, beta1=0.5, beta2=0.5, weight_decay=0.0)

    assert param[marks].tolist() == [-0.25] * 4
    assert exp_avg[marks].tolist() == [0.5, 1.0, 2.0, 4.0]
    assert exp_avg_sq[marks].tolist() == [0.5, 2.0, 8.0, 32.0]
    for tensor in (param, exp_avg, exp_avg_sq):
        assert tensor.count_nonzero().item() == 4


@pytest.fixture(scope="module")
def zeros(device):
    if free_gib(device) < 12:
        pytest.skip(f"needs 12 GiB of free memory on {device.type}")
    return torch.zeros(SIZE, dtype=torch.bfloat16, device=device)


@pytest.fixture
def marked(zeros):
    """Return a tensor that is zero except at its four marks."""
    zeros[MARKS] = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=zeros.dtype, device=zeros.device)
    return zeros


@pytest.mark.slow
def test_norm_includes_the_last_elements(marked):
    for ord, expected in ((1.0, 15.0), (2.0, math.sqrt(85)), (math.inf, 8.0)):
        result = multi_tensor_norm([marked[:3], marked], ord)

        assert result.total_norm.item() == pytest.approx(expected, rel=1e-6)
        assert result.norms[0].item() == 0
        assert result.found_inf.item() == 0

    marked[-1] = math.nan
    result = multi_tensor_norm([marked[:3], marked])

    assert result.found_inf.item() == 1
    assert result.first_nonfinite.item() == 1


@pytest.mark.slow
def test_last_elements_are_unscaled_and_clipped(marked):
    found_inf, half = torch.tensor([0.0, 0.5], device=marked.device)

    multi_tensor_unscale_norm([marked[:: 2**31]], found_inf, half)  # elements 0 and 2³¹

    assert marked[MARKS].tolist() == [1.0, 2.0, 2.0, 8.0]

    result = multi_tensor_unscale_norm([marked], found_inf, half)
    multi_tensor_clip([marked], torch.tensor(2e6, device=marked.device), 1e6)

    assert result.total_norm.item() == pytest.approx(math.sqrt(73) / 2, rel=1e-6)
    assert marked[MARKS].tolist() == [0.25, 0.5, 0.5, 2.0]
    assert marked.count_nonzero().item() == 4
