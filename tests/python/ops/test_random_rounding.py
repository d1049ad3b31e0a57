"""Steps that round 16-bit parameters at random: bias, and numbers that are not rounded."""

import pytest
import torch
from ampfuse.ops import fused_sgd

DTYPES_16_BIT = [torch.float16, torch.bfloat16]


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_random_rounding_has_no_bias(device, dtype):
    torch.manual_seed(0)
    values = torch.rand(8192, dtype=torch.float64)
    if dtype == torch.float16:
        values[:1024] *= 2.0**-17  # subnormal numbers
    last_place = torch.finfo(dtype).eps * 2.0 ** torch.frexp(values)[1].double() / 2
    last_place.clamp_min_(torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    # A step from 0 with the gradient -value and the rate 1 leads to the value before rounding.
    copies = 128
    grad = -values.float().repeat(copies).to(device)
    param = torch.empty_like(grad, dtype=dtype)
    total = torch.zeros_like(grad, dtype=torch.float64)
    steps = torch.zeros((), device=device)
    rounds = 100_000 // copies
    for _ in range(rounds):
        fused_sgd(
            [param.zero_()],
            [grad],
            state_steps=[steps],
            lr=torch.tensor(1.0, dtype=torch.float64),
            round_at_random=True,
            seed=1,
        )
        total += param
    mean = total.view(copies, 8192).sum(0).cpu() / (rounds * copies)
    error = (mean - values.float().double()) / last_place
    # The deviation of one draw is at most half a last place: that of a value's mean is 0.0016, and
    # that of the mean of all values 1.8e-5.
    assert error.mean().abs() < 3e-5
    assert error.abs().max() < 0.008


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", DTYPES_16_BIT)
def test_numbers_that_the_dtype_has_are_not_rounded(device, dtype):
    finite = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    params = finite.clone().to(device)
    fused_sgd(
        [params],
        [torch.zeros_like(params)],
        state_steps=[torch.zeros((), device=device)],
        lr=torch.tensor(1.0, dtype=torch.float64),
        round_at_random=True,
    )
    number = ~finite.isnan()
    assert (params.cpu()[number] == finite[number]).all()
    assert params.cpu()[~number].isnan().all()


def test_the_largest_numbers_are_rounded_to_nearest(device):
    for dtype, value in ((torch.float16, 65505.0), (torch.bfloat16, 3.3896e38)):
        params = torch.zeros(4096, dtype=dtype, device=device)
        fused_sgd(
            [params],
            [torch.full((4096,), -value, device=device)],
            state_steps=[torch.zeros((), device=device)],
            lr=torch.tensor(1.0, dtype=torch.float64),
            round_at_random=True,
        )
        assert (params == torch.finfo(dtype).max).all()


def test_negative_first_indices_are_refused(device):
    param = torch.ones(4, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match=r"first_indices\[0\]: expected at least 0, got -3"):
        fused_sgd(
            [param],
            [param.clone()],
            state_steps=[torch.zeros((), device=device)],
            lr=torch.tensor(1.0, dtype=torch.float64),
            round_at_random=True,
            first_indices=[-3],
        )
