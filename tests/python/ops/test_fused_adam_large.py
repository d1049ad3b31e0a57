"""fused_adam on tensors of more than 2³¹ elements: it steps the last elements, too, once."""

import pytest
import torch
from ampfuse.ops import fused_adam
from reference import free_gib

OPTIONS = {"beta1": 0.5, "beta2": 0.5, "weight_decay": 0.0, "eps": 1e-8}
OPTIONS |= {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}

# The small size checks the test itself on machines without memory for the large size.
SIZES = [3 * 2**16 + 8193, pytest.param(2**31 + 8193, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
def test_step_changes_exactly_the_elements_with_a_gradient(device, size):
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

    fused_adam(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.zeros((), device=device)],
        [remainder],
        lr=torch.tensor(0.25),
        **OPTIONS,
    )

    assert param[marks].tolist() == [-0.25] * 4
    assert exp_avg[marks].tolist() == [0.5, 1.0, 2.0, 4.0]
    assert exp_avg_sq[marks].tolist() == [0.5, 2.0, 8.0, 32.0]
    for tensor in (param, exp_avg, exp_avg_sq):
        assert tensor.count_nonzero().item() == 4
