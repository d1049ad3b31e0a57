"""Tensors whose memory was freed, or whose elements are at addresses that torch cannot read."""

import ampfuse
import numpy
import pytest
import torch
from adam_reference import OPTIONS
from ampfuse import ops

POLICY = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}


def without_memory(tensor):
    """Free the storage of a tensor, as some frameworks do between uses."""
    tensor.untyped_storage().resize_(0)
    return tensor


def freed(value=0.5, device="cpu"):
    """Return a scalar whose storage was freed."""
    return without_memory(torch.tensor(value, device=device))


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


def freed_part(like):
    """Return a part of a storage that was freed. Its address is an offset, and so not null."""
    return without_memory(torch.stack([like, like])[1])


@pytest.mark.parametrize("name", ["input", "target", "weight", "weight of another dtype"])
def test_parts_of_freed_memory_are_refused(device, name):
    arguments = {
        "input": torch.zeros(2, 3, device=device),
        "target": torch.zeros(2, dtype=torch.long, device=device),
        "weight": torch.ones(3, device=device),
    }
    argument, _, is_converted = name.partition(" ")
    like = arguments[argument]
    arguments[argument] = freed_part(like.double() if is_converted else like)
    with pytest.raises(ValueError, match=f"{argument}: its storage is empty"):
        ampfuse.cross_entropy(**arguments)


def test_freed_memory_that_has_to_be_copied_first_is_refused(device):
    logits = torch.zeros(7, 5, device=device)
    target = torch.zeros(7, dtype=torch.long, device=device)
    probabilities = freed_part(torch.zeros(7, 5, device=device).double())
    transposed = without_memory(torch.zeros(2, 5, 7, device=device)[1].t())
    with pytest.raises(ValueError, match="input: its storage is empty"):
        ampfuse.cross_entropy(transposed, target)
    strided = without_memory(torch.zeros(28, dtype=torch.long, device=device)[14::2])
    with pytest.raises(ValueError, match="target: its storage is empty"):
        ampfuse.cross_entropy(logits, strided)
    with pytest.raises(ValueError, match="target: its storage is empty"):
        ampfuse.cross_entropy(logits, probabilities)
    with pytest.raises(ValueError, match="target: its storage is empty"):
        ampfuse.linear_cross_entropy(logits, torch.zeros(5, 5, device=device), probabilities)


@pytest.mark.parametrize("layout", ["to_sparse", "to_mkldnn"])
def test_class_weights_without_a_storage_do_not_crash(layout):
    logits, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    weight = getattr(torch.ones(3), layout)()
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        ampfuse.cross_entropy(logits, target, weight)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        ampfuse.linear_cross_entropy(logits, torch.zeros(3, 3), target, class_weight=weight)


@pytest.mark.parametrize("name", ["hidden", "weight", "bias", "target", "class_weight"])
def test_parts_of_freed_memory_are_refused_by_the_linear_loss(device, name):
    arguments = {
        "hidden": torch.zeros(2, 4, device=device),
        "weight": torch.zeros(3, 4, device=device),
        "target": torch.zeros(2, dtype=torch.long, device=device),
        "bias": torch.zeros(3, device=device),
        "class_weight": torch.ones(3, device=device),
    }
    arguments[name] = freed_part(arguments[name])
    with pytest.raises(ValueError, match=f"linear_cross_entropy: {name}: its storage is empty"):
        ampfuse.linear_cross_entropy(**arguments)


@pytest.mark.parametrize("name", ["params", "grads", "exp_avgs", "exp_avg_sqs", "state_steps"])
def test_freed_tensors_of_a_step_are_refused(device, name):
    lists = {
        column: [torch.ones(3, device=device) for _ in range(2)]
        for column in ("params", "grads", "exp_avgs", "exp_avg_sqs")
    }
    lists["state_steps"] = [torch.ones((), device=device) for _ in range(2)]
    lists[name][1] = freed_part(lists[name][1])
    with pytest.raises(ValueError, match=rf"{name}\[1\]: its storage is empty"):
        ops.fused_adam(**OPTIONS, **lists, max_exp_avg_sqs=[], masters=[], lr=torch.tensor(0.1))


@pytest.mark.parametrize("name", ["scale", "growth_tracker", "counters", "history"])
def test_freed_state_of_a_scale_is_refused(device, name):
    state = {
        "scale": torch.tensor(8.0, device=device),
        "growth_tracker": torch.tensor(0, dtype=torch.int32, device=device),
        "counters": torch.tensor([1, 0, 0], device=device),
        "history": torch.zeros(4, 3, device=device),
    }
    state[name] = freed_part(state[name])
    with pytest.raises(ValueError, match=f"{name}: its storage is empty"):
        ops.update_scale(**state, **POLICY, found_infs=[torch.zeros((), device=device)])


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
