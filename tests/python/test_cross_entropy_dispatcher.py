"""torch's own checks of the operators of cross-entropy."""

import pytest
import torch
from cross_entropy_samples import CROSS_ENTROPY_SAMPLES, rows
from torch._subclasses.fake_tensor import FakeTensorMode

EVERY_OP = pytest.mark.parametrize("op", CROSS_ENTROPY_SAMPLES)
EVERY_DTYPE = pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64]
)


def overload(op):
    name, _, which = op.partition(".")
    return getattr(getattr(torch.ops.ampfuse, name), which or "default")


@EVERY_OP
@EVERY_DTYPE
@pytest.mark.parametrize("count", [4, 0])
def test_opcheck(device, op, dtype, count):
    torch.library.opcheck(overload(op), CROSS_ENTROPY_SAMPLES[op](dtype, device, count))


@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy.metrics"])
@EVERY_DTYPE
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_opcheck_with_gradients(device, op, dtype, reduction):
    logits, target = rows(dtype, device)
    torch.library.opcheck(overload(op), (logits.requires_grad_(), target, None, reduction))


def looks(results):
    """What tells results apart but for their values."""
    results = results if isinstance(results, tuple) else [results]
    return [(tuple(x.shape), x.dtype, x.device, x.stride()) for x in results if x is not None]


@EVERY_OP
@EVERY_DTYPE
def test_fake_results_look_like_real_ones(device, op, dtype):
    sample = CROSS_ENTROPY_SAMPLES[op](dtype, device, 4)
    real = overload(op)(*sample)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in sample]
        assert looks(overload(op)(*fakes)) == looks(real)
