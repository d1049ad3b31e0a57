"""Tests of the operators of cross-entropy: torch's own checks, and invalid arguments."""

import pytest
import torch
from cross_entropy_samples import CROSS_ENTROPY_SAMPLES, SUM, batch, statistics_of
from op_overloads import overload
from torch.library import opcheck

OPS = torch.ops.ampfuse


# The results' metadata differ only between float64 and other dtypes.
@pytest.mark.parametrize("op", CROSS_ENTROPY_SAMPLES)
@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.bfloat16, 4), (torch.float64, 4), (torch.float32, 0)]
)
def test_operators_pass_opcheck(device, op, dtype, count):
    opcheck(overload(op), CROSS_ENTROPY_SAMPLES[op](dtype, device, count))


# Forward computes the gradient for a mean, and nothing for a float16 one without grad_scale.
@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy.metrics"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", [0, 1])
def test_public_operators_pass_opcheck_with_gradients(device, op, dtype, reduction):
    logits, target = batch(device, (4, 6), dtype)
    opcheck(overload(op), (logits, target, None, reduction))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("images", [2, 0])
def test_operators_pass_opcheck_with_positions(device, dtype, images):
    logits, target = batch(device, (images, 5, 33), dtype, leaf=False)
    opcheck(OPS.cross_entropy.default, (logits, target, None, SUM))
    target = target.view(-1)
    options = (None, SUM, -100, 0.1, None, None, 0.0, None)
    for for_backward in (0, 1, 2):  # nothing, statistics, the gradient
        sample = (logits, target, *options, for_backward, True)
        opcheck(OPS.cross_entropy_forward.default, sample)
    baked = torch.ones((), device=device)
    one = baked.to(torch.promote_types(dtype, torch.float32))
    options = (None, *statistics_of(logits, target), 1, -100, 0.0, 0.0, None)
    opcheck(OPS.cross_entropy_backward.default, (one, logits, target, *options))
    opcheck(OPS.cross_entropy_rescale_.default, (logits, baked, 3 * one))


def test_backward_refuses_tensors_that_forward_cannot_have_returned(device):
    logits, target = batch(device, (4, 6), leaf=False)
    statistics, divisor = statistics_of(logits, target)
    one = torch.ones((), device=device)

    def grad(upstream=one, statistics=statistics, divisor=divisor, reduction=1):
        arguments = (logits, target, None, statistics, divisor, reduction, -100, 0.0, 0.0, None)
        return OPS.cross_entropy_backward.default(upstream, *arguments)

    assert grad().shape == logits.shape
    for wrong in (
        {"upstream": one[None]},
        {"reduction": 0},
        {"reduction": 3},
        {"statistics": statistics[:1]},
        {"statistics": statistics.float()},
        {"divisor": divisor.float()},
        {"upstream": one.to("meta")},
        {"statistics": statistics.to("meta")},
    ):
        with pytest.raises(ValueError, match="expected"):
            grad(**wrong)


def forward(logits, target, weight=None, for_backward=0):
    options = (weight, 1, -100, 0.0, None, None, 0.0, None, for_backward, False)
    return OPS.cross_entropy_forward.default(logits, target, *options)


def test_errors_about_strides_name_the_strides(device):
    logits, target = batch(device, (4, 6), leaf=False)
    probabilities = torch.ones(6, 4, device=device).t()
    with pytest.raises(ValueError, match=r"last dimension has stride 1, got .* strides \[1, \d+\]"):
        forward(logits, probabilities)
    weight = torch.ones(12, device=device)[::2]
    with pytest.raises(ValueError, match=r"weight: expected contiguous .* and strides \[2\] on"):
        forward(logits, target, weight)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_forward_refuses_unknown_values_of_for_backward(device, wrong):
    with pytest.raises(ValueError, match=f"for_backward: expected 0 .*, got {wrong}"):
        forward(*batch(device, (4, 6), leaf=False), for_backward=wrong)


def test_rescale_refuses_gradients_without_rows_in_memory_of_their_own(device):
    one = torch.ones((), device=device)
    whole = torch.ones(4, 6, device=device)
    for wrong in (whole[:, ::2], whole[:1].expand(4, 6), whole.t(), whole.long(), whole[0]):
        with pytest.raises(ValueError, match="expected floating-point rows that share no memory"):
            OPS.cross_entropy_rescale_(wrong, one, 3 * one)
    assert (whole == 1).all()
    with pytest.raises(ValueError, match=r"expected floating-point rows .*, got float8_e4m3fn"):
        OPS.cross_entropy_rescale_(whole.to(torch.float8_e4m3fn), one, 3 * one)
