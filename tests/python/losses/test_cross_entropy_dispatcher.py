"""Tests of the operators of cross-entropy: torch's own checks, and invalid arguments."""

import pytest
import torch
from cross_entropy_samples import CROSS_ENTROPY_SAMPLES, STATISTICS, rows
from op_overloads import looks, overload
from torch._subclasses.fake_tensor import FakeTensorMode

EVERY_OP = pytest.mark.parametrize("op", CROSS_ENTROPY_SAMPLES)
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("count", [4, 0])
def test_operators_pass_opcheck(device, op, dtype, count):
    torch.library.opcheck(overload(op), CROSS_ENTROPY_SAMPLES[op](dtype, device, count))


@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy.metrics"])
@EVERY_DTYPE
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_public_operators_pass_opcheck_with_gradients(device, op, dtype, reduction):
    logits, target = rows(dtype, device)
    torch.library.opcheck(overload(op), (logits.requires_grad_(), target, None, reduction))


@EVERY_OP
@EVERY_DTYPE
def test_fake_results_have_the_metadata_of_real_ones(device, op, dtype):
    sample = CROSS_ENTROPY_SAMPLES[op](dtype, device, 4)
    real = overload(op)(*sample)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in sample]
        assert looks(overload(op)(*fakes)) == looks(real)


def test_backward_refuses_tensors_that_forward_cannot_have_returned(device):
    logits, target = rows(torch.float32, device)
    forward = torch.ops.ampfuse.cross_entropy_forward.default
    backward = torch.ops.ampfuse.cross_entropy_backward.default
    rest = (None, 1, -100, 0.0)
    outputs = forward(logits, target, *rest, None, None, 0.0, None, STATISTICS, False)
    statistics, divisor = outputs[3:5]
    one = torch.ones((), device=device)

    def grad(upstream=one, statistics=statistics, divisor=divisor, reduction=1):
        arguments = (logits, target, None, statistics, divisor, reduction, -100, 0.0, 0.0, None)
        return backward(upstream, *arguments)

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


def test_errors_about_strides_name_the_strides(device):
    logits, _ = rows(torch.float32, device)
    forward = torch.ops.ampfuse.cross_entropy_forward.default
    rest = (1, -100, 0.0, None, None, 0.0, None, 0, False)
    classes = logits.shape[1]
    probabilities = torch.ones(classes, len(logits), device=device).t()
    with pytest.raises(ValueError, match=r"last dimension has stride 1, got .* strides \[1, \d+\]"):
        forward(logits, probabilities, None, *rest)
    weight = torch.ones(2 * classes, device=device)[::2]
    target = torch.zeros(len(logits), dtype=torch.long, device=device)
    with pytest.raises(ValueError, match=r"weight: expected contiguous .* and strides \[2\] on"):
        forward(logits, target, weight, *rest)


def test_rescale_refuses_gradients_without_rows_in_memory_of_their_own(device):
    rescale = torch.ops.ampfuse.cross_entropy_rescale_.default
    one = torch.ones((), device=device)
    whole = torch.ones(4, 6, device=device)
    for wrong in (whole[:, ::2], whole[:1].expand(4, 6), whole.t(), whole.long(), whole[0]):
        with pytest.raises(ValueError, match="expected floating-point rows that share no memory"):
            rescale(wrong, one, 3 * one)
    assert (whole == 1).all()


@pytest.mark.parametrize("wrong", [-1, 4])
def test_forward_refuses_unknown_values_of_for_backward(device, wrong):
    logits, target = rows(torch.float32, device)
    with pytest.raises(ValueError, match=f"for_backward: expected 0 .*, got {wrong}"):
        torch.ops.ampfuse.cross_entropy_forward(
            logits, target, None, 1, -100, 0.0, None, None, 0.0, None, wrong, False
        )
