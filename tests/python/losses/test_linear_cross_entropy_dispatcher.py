"""Tests of the operators of linear cross-entropy: torch's own checks, and empty gradients."""

import pytest
import torch
from linear_samples import LINEAR_KEYWORDS, LINEAR_SAMPLES, public
from op_overloads import looks, overload
from torch._subclasses.fake_tensor import FakeTensorMode

EVERY_OP = pytest.mark.parametrize("op", LINEAR_SAMPLES)
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("count", [8, 0])
def test_operators_pass_opcheck(device, op, dtype, count):
    sample = LINEAR_SAMPLES[op](dtype, device, count)
    torch.library.opcheck(overload(op), sample, LINEAR_KEYWORDS.get(op, {}))


@pytest.mark.parametrize("op", ["linear_cross_entropy", "linear_cross_entropy.metrics"])
@EVERY_DTYPE
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_public_operators_pass_opcheck_with_gradients(device, op, dtype, reduction):
    hidden, weight, target, bias = public(dtype, device, 8)
    tensors = [tensor.requires_grad_() for tensor in (hidden, weight, bias)]
    sample = (tensors[0], tensors[1], target, tensors[2])
    torch.library.opcheck(overload(op), sample, {"reduction": reduction, "chunk_rows": 3})


@EVERY_OP
@EVERY_DTYPE
def test_fake_results_have_the_metadata_of_real_ones(device, op, dtype):
    sample, keywords = LINEAR_SAMPLES[op](dtype, device, 8), LINEAR_KEYWORDS.get(op, {})
    real = overload(op)(*sample, **keywords)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in sample]
        assert looks(overload(op)(*fakes, **keywords)) == looks(real)


@pytest.mark.parametrize(
    "wanted", [[False] * 3, [True, False, False], [False, True, False], [False, False, True]]
)
@pytest.mark.parametrize("op", ["linear_cross_entropy_forward", "linear_cross_entropy_backward"])
def test_gradients_that_are_not_requested_are_empty(device, op, wanted):
    sample = list(LINEAR_SAMPLES[op](torch.bfloat16, device, 8))
    sample[19 if op.endswith("forward") else 20] = wanted
    results = overload(op)(*sample)
    grads = results[1:4] if op.endswith("forward") else results
    assert [grad.numel() > 0 for grad in grads] == wanted


def test_meta_tensors_give_a_loss_of_the_right_shape(device):
    hidden, weight, target, bias = (x.to("meta") for x in public(torch.bfloat16, device, 8))
    loss = overload("linear_cross_entropy")(hidden, weight, target, bias)
    assert loss.is_meta
    assert loss.shape == ()


# float16 sums would overflow. The other dtypes are neither those of products nor of sums.
@pytest.mark.parametrize(
    ("dtype", "of_weight"),
    [
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize("op", ["linear_cross_entropy_forward", "linear_cross_entropy_backward"])
def test_weight_grad_dtype_must_be_that_of_products_or_sums(device, op, dtype, of_weight):
    sample = list(LINEAR_SAMPLES[op](dtype, device, 8))
    sample[14 if op.endswith("forward") else 15] = of_weight
    with pytest.raises(TypeError, match=r"weight_grad_dtype: expected .* for products of"):
        overload(op)(*sample)
