"""Tensors whose memory was freed, is misaligned, or may only be read.

Freed tensors in lists, and freed scalars of the ops over lists, are in test_list_errors.py.
"""

import signal
import sys

import ampfuse
import numpy
import pytest
import torch
import warm
from ampfuse import ops
from reference import freed
from scale_reference import Scale

LOSSES = {
    "cross_entropy": ["input", "target", "weight", "denominator", "grad_scale"],
    "linear_cross_entropy": [
        *("hidden", "weight", "target", "bias", "class_weight", "denominator", "grad_scale")
    ],
}


# Class weights of another dtype than the logits have to be converted.
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("loss", "name"), [(x, name) for x in LOSSES for name in LOSSES[x]])
def test_freed_arguments_of_losses_are_refused(device, loss, name, weight_dtype):
    values = {
        "input": torch.zeros(2, 3, device=device),
        "hidden": torch.zeros(2, 4, device=device),
        "weight": torch.zeros(3, 4, device=device),
        "class_weight": torch.ones(3, dtype=weight_dtype, device=device),
        "target": torch.zeros(2, dtype=torch.long, device=device),
        "bias": torch.zeros(3, device=device),
        "denominator": torch.tensor(0.5, device=device),
        "grad_scale": torch.tensor(0.5, device=device),
    }
    arguments = {key: values[key] for key in LOSSES[loss]}
    if loss == "cross_entropy":
        arguments["weight"] = values["class_weight"]
    arguments[name] = freed(arguments[name])

    with pytest.raises(ValueError, match=f"{loss}: {name}: its storage is empty"):
        getattr(ampfuse, loss)(**arguments)


def test_freed_memory_that_has_to_be_copied_first_is_refused(device):
    logits = torch.zeros(7, 5, device=device)
    target = torch.zeros(7, dtype=torch.long, device=device)
    transposed = torch.zeros(2, 5, 7, device=device)[1].t()
    strided = torch.zeros(28, dtype=torch.long, device=device)[14::2]
    by_columns = torch.zeros(7, 3, 5, device=device).transpose(0, 1)
    for tensor in (transposed, strided, by_columns):
        tensor.untyped_storage().resize_(0)
    probabilities = freed(torch.zeros(7, 5, device=device).double())
    with pytest.raises(ValueError, match="input: its storage is empty"):
        ampfuse.cross_entropy(transposed, target)
    for unreadable in (strided, probabilities):
        with pytest.raises(ValueError, match="target: its storage is empty"):
            ampfuse.cross_entropy(logits, unreadable)
    weight = torch.zeros(5, 5, device=device)
    with pytest.raises(ValueError, match="target: its storage is empty"):
        ampfuse.linear_cross_entropy(logits, weight, probabilities)
    with pytest.raises(ValueError, match="hidden: its storage is empty"):
        ampfuse.linear_cross_entropy(by_columns, weight, target.expand(3, 7))


@pytest.mark.parametrize("layout", ["to_sparse", "to_mkldnn"])
def test_class_weights_without_a_storage_do_not_crash(layout):
    logits, target = torch.zeros(2, 3), torch.zeros(2, dtype=torch.long)
    weight = getattr(torch.ones(3), layout)()
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        ampfuse.cross_entropy(logits, target, weight)
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        ampfuse.linear_cross_entropy(logits, torch.zeros(3, 3), target, class_weight=weight)


@pytest.mark.parametrize("name", ["scale", "growth_tracker", "counters", "history"])
def test_freed_state_of_a_scale_is_refused(device, name):
    scale = Scale(device, history=4)
    setattr(scale, name, freed(getattr(scale, name)))
    with pytest.raises(ValueError, match=f"{name}: its storage is empty"):
        scale.update(0.0)


@pytest.mark.vectorised
@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64])
def test_misaligned_complex_numbers_are_read_and_written(dtype):
    kind = numpy.complex128 if dtype == torch.complex128 else numpy.complex64
    for count in (1, 3, 17):
        for offset in (1, 4, 8):
            memory = numpy.zeros(64 + 16 * count, dtype=numpy.uint8)
            start = -memory.ctypes.data % 64 + offset
            numbers = memory[start : start + count * dtype.itemsize].view(kind)
            numbers[:] = 3 + 4j
            tensors, found_inf = [torch.from_numpy(numbers)], torch.zeros(())

            norms = [ops.multi_tensor_norm(tensors, ord).total_norm.item() for ord in (2.0, 1.0)]
            assert norms == pytest.approx([5 * count**0.5, 5 * count])
            result = ops.multi_tensor_unscale_norm(tensors, found_inf, torch.tensor(0.5))
            assert result.total_norm.item() == pytest.approx(2.5 * count**0.5)
            ops.multi_tensor_unscale(tensors, found_inf, torch.tensor(2.0))
            ops.multi_tensor_clip(tensors, torch.tensor(2.0), 1.0)

            numpy.testing.assert_allclose(numbers, 1.5 + 2j, rtol=1e-6)
            assert found_inf == 0


# A program that calls ops on read-only memory, each in a process of its own, since a store ends it.
# It prints the exit code of each of these: 0, or the negative number of a signal.
PROGRAM = """
import mmap
import os
import resource
import warnings
import torch
from ampfuse.ops import multi_tensor_clip, multi_tensor_unscale, multi_tensor_unscale_norm

CALLS = {
    "unscale": lambda x, factor: multi_tensor_unscale([x], torch.zeros(()), torch.tensor(factor)),
    "unscale_norm": lambda x, factor: multi_tensor_unscale_norm(
        [x], torch.zeros(()), torch.tensor(factor)
    ),
    "clip": lambda x, factor: multi_tensor_clip([x], torch.tensor(1.0), 2 * factor),
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
warnings.filterwarnings("ignore", message="The given buffer is not writable")
zeros = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ)

def exit_code(call, factor, step):
    child = os.fork()
    if child == 0:
        for dtype in DTYPES:
            CALLS[call](torch.frombuffer(zeros, dtype=dtype)[::step], factor)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for call in CALLS:
    print(call, [exit_code(call, factor, step) for factor in (1.0, 0.25) for step in (1, 2)])
"""


def test_factor_one_writes_nothing():
    command = [sys.executable, "-c", PROGRAM]
    done = warm.run(command, capture_output=True, text=True, check=True)

    outcomes = [0, 0, *[-signal.SIGSEGV] * 2]  # factor 1, then another factor
    expected = [f"{call} {outcomes}" for call in ("unscale", "unscale_norm", "clip")]
    assert done.stdout.splitlines() == expected
