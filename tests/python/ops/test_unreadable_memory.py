"""Tensors whose memory was freed, or whose elements are at addresses that torch cannot read."""

import ampfuse
import numpy
import pytest
import torch
from ampfuse import ops


def freed(value=0.5, device="cpu"):
    """Return a scalar whose storage was freed. Some frameworks free storages between uses."""
    tensor = torch.tensor(value, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def test_flag_or_scale_without_memory_is_refused(device):
    tensors, half = [torch.full((3,), torch.inf, device=device)], torch.tensor(0.5, device=device)

    for call in (ops.multi_tensor_unscale, ops.multi_tensor_unscale_norm):
        with pytest.raises(ValueError, match="found_inf: its storage is empty"):
            call(tensors, freed(device=device), half)
        with pytest.raises(ValueError, match="inv_scale: its storage is empty"):
            call(tensors, torch.zeros((), device=device), freed(device=device))


def test_norm_without_memory_is_refused(device):
    with pytest.raises(ValueError, match="total_norm: its storage is empty"):
        ops.multi_tensor_clip([torch.ones(3, device=device)], freed(device=device), 1.0)


@pytest.mark.parametrize("name", ["denominator", "grad_scale"])
def test_scalars_of_losses_without_memory_are_refused(device, name):
    logits = torch.zeros(2, 3, device=device, requires_grad=True)
    target, number = torch.tensor([0, 1], device=device), {name: freed(device=device)}

    with pytest.raises(ValueError, match=f"{name}: its storage is empty"):
        ampfuse.cross_entropy(logits, target, **number)
    weight = torch.zeros(4, 3, device=device)
    with pytest.raises(ValueError, match=f"{name}: its storage is empty"):
        ampfuse.linear_cross_entropy(logits, weight, target, **number)


@pytest.mark.parametrize("count", [1, 3, 17])
@pytest.mark.parametrize("offset", [1, 4, 8])
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_misaligned_complex_numbers_are_read_and_written(dtype, offset, count):
    memory = numpy.zeros(64 + 16 * count, dtype=numpy.uint8)
    start = -memory.ctypes.data % 64 + offset
    kind = numpy.complex128 if dtype == torch.complex128 else numpy.complex64
    numbers = memory[start : start + count * dtype.itemsize].view(kind)
    numbers[:] = 3 + 4j
    tensor = torch.from_numpy(numbers)
    found_inf = torch.zeros(())

    assert ops.multi_tensor_norm([tensor]).total_norm.item() == pytest.approx(5 * count**0.5)
    assert ops.multi_tensor_norm([tensor], 1.0).total_norm.item() == pytest.approx(5 * count)
    norm = ops.multi_tensor_unscale_norm([tensor], found_inf, torch.tensor(0.5)).total_norm
    assert norm.item() == pytest.approx(2.5 * count**0.5)
    ops.multi_tensor_unscale([tensor], found_inf, torch.tensor(2.0))
    ops.multi_tensor_clip([tensor], torch.tensor(2.0), 1.0)

    numpy.testing.assert_allclose(numbers, 1.5 + 2j, rtol=1e-6)
    assert found_inf == 0
