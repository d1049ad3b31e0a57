"""Unusual tensors that the clipping functions refuse, leave to torch or clip."""

import ampfuse
import pytest
import torch
from reference import heavy_tailed


def parameter_with(grad):
    parameter = torch.nn.Parameter(torch.zeros_like(grad, memory_format=torch.contiguous_format))
    parameter.grad = grad
    return parameter


class Tagged(torch.Tensor):
    """A tensor subclass that overrides no operation."""


def test_tensor_subclasses_are_left_to_torch(device):
    def clipped(clip):
        grad = heavy_tailed(33, torch.float32, device).as_subclass(Tagged)
        parameter = torch.zeros(33, device=device).as_subclass(Tagged)
        parameter.grad = grad
        return clip([parameter], 1.0), grad

    norm, grad = clipped(ampfuse.clip_grad_norm_)

    expected, expected_grad = clipped(torch.nn.utils.clip_grad_norm_)
    assert type(norm) is type(expected) is Tagged
    assert torch.equal(norm, expected)
    assert torch.equal(grad, expected_grad)


def test_expanded_gradient_is_refused_before_anything_is_written(device):
    good = parameter_with(torch.full((3,), 4.0, device=device))
    expanded = parameter_with(torch.ones(1, device=device).expand(3))

    with pytest.raises(ValueError, match=r"parameters\[2\].grad: more than one element"):
        ampfuse.clip_grad_norm_([good, torch.nn.Parameter(torch.zeros(1)), expanded], 1.0)

    assert good.grad.tolist() == [4.0] * 3


@pytest.mark.parametrize(("dtype", "value"), [(torch.float64, 1e200), (torch.float32, 1e30)])
def test_total_norm_is_finite_when_squares_overflow_and_torch_returns_inf(device, dtype, value):
    tensors = [torch.full((2,), value, dtype=dtype, device=device) for _ in range(2)]

    norm = ampfuse.get_total_norm(tensors)

    assert norm.item() == pytest.approx(2 * value, rel=1e-6)
    assert torch.nn.utils.get_total_norm(tensors).isinf()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_total_norm_of_integer_or_bool_tensors_is_refused(device, dtype):
    with pytest.raises(
        TypeError, match=r"tensors\[1\]: expected a tensor of dtype float16, bfloat16"
    ):
        ampfuse.get_total_norm(
            [torch.ones(3, device=device), torch.ones(3, device=device).to(dtype)]
        )


def sparse_gradient(device):
    embedding = torch.nn.Embedding(4, 2, sparse=True, device=device)
    embedding(torch.tensor([1, 3], device=device)).sum().backward()
    return embedding.weight


def test_sparse_gradient_is_clipped_if_torch_can_and_refused_otherwise(device):
    ours, theirs = sparse_gradient(device), sparse_gradient(device)
    try:
        expected = torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    except NotImplementedError:  # torch 2.11 has no norm of sparse tensors
        with pytest.raises(ValueError, match=r"parameters\[0\].grad: expected a strided tensor"):
            ampfuse.clip_grad_norm_([ours], 1.0)
        return

    assert torch.equal(ampfuse.clip_grad_norm_([ours], 1.0), expected)
    assert torch.equal(ours.grad.to_dense(), theirs.grad.to_dense())


def test_sparse_gradient_is_clipped_with_a_given_norm_as_in_torch(device):
    ours, theirs = sparse_gradient(device), sparse_gradient(device)
    total_norm = torch.tensor(4.0, device=device)
    torch.nn.utils.clip_grads_with_norm_([theirs], 1.0, total_norm)

    ampfuse.clip_grads_with_norm_([ours], 1.0, total_norm)

    torch.testing.assert_close(ours.grad.to_dense(), theirs.grad.to_dense(), rtol=1e-6, atol=0)


def test_expanded_gradient_on_another_device_is_refused_before_any_write():
    good = parameter_with(torch.full((3,), 4.0))
    expanded = parameter_with(torch.ones(1, device="meta").expand(3))

    with pytest.raises(ValueError, match=r"parameters\[1\].grad: more than one element"):
        ampfuse.clip_grads_with_norm_([good, expanded], 1.0, torch.tensor(8.0))

    assert good.grad.tolist() == [4.0] * 3


@pytest.mark.needs_cuda
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_gradients_on_two_devices_are_clipped_as_in_torch(norm_type):
    def clipped(clip):
        parameters = [
            parameter_with(heavy_tailed(33, torch.float32, torch.device(device), seed))
            for seed, device in enumerate(["cuda", "cpu", "cuda"])
        ]
        return clip(parameters, 1.0, norm_type), parameters

    norm, parameters = clipped(ampfuse.clip_grad_norm_)

    expected, others = clipped(torch.nn.utils.clip_grad_norm_)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for parameter, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=2e-6, atol=0)


def test_complex_total_norm_is_refused(device):
    with pytest.raises(TypeError, match="total_norm: expected dtype"):
        ampfuse.clip_grads_with_norm_(
            [parameter_with(torch.ones(3, device=device))], 1.0, torch.ones((), device=device) * 1j
        )
