"""The host never waits for the GPU; torch would raise an error if it did."""

import ampfuse
import pytest
import torch
from ampfuse import ops
from reference import heavy_tailed

pytestmark = pytest.mark.needs_cuda

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64]


def gradients():
    """Return many tensors of all dtypes, some of them strided."""
    cuda = torch.device("cuda")
    tensors = [heavy_tailed(3, DTYPES[i % 5], cuda, seed=i) for i in range(700)]
    return [*tensors, *(heavy_tailed((33, 2), dtype, cuda)[:, 1] for dtype in DTYPES)]


def test_waiting_for_the_gpu_raises_an_error(waits_are_errors):
    number = torch.ones((), device="cuda")
    waits_are_errors()

    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        number.item()


@pytest.mark.parametrize("inv_scale", [0.5, 1.0, float("nan")])
@pytest.mark.parametrize("ord", [1.0, 2.0, float("inf")])
def test_operators_do_not_wait_for_the_gpu(waits_are_errors, inv_scale, ord):
    tensors, found_inf = gradients(), torch.zeros((), device="cuda")
    inv_scale = torch.tensor(inv_scale, device="cuda")
    torch.cuda.synchronize()
    waits_are_errors()

    ops.multi_tensor_unscale(tensors, found_inf, inv_scale)
    total_norm = ops.multi_tensor_norm(tensors, ord).total_norm
    ops.multi_tensor_clip(tensors, total_norm, 1.0)
    ops.multi_tensor_unscale_norm(tensors, found_inf, inv_scale, ord)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_gradient_clipping_does_not_wait_for_the_gpu(waits_are_errors, norm_type):
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in gradients()]
    for parameter, grad in zip(parameters, gradients(), strict=True):
        parameter.grad = grad
    torch.cuda.synchronize()
    waits_are_errors()

    ampfuse.clip_grad_norm_(parameters, 1.0, norm_type)
