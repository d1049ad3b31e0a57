"""Tests of the memory of linear_cross_entropy: gradients, and one chunk of logits."""

from dataclasses import replace

import pytest
import torch
from harness.memory import extra_peak as peak
from linear_reference import head
from torch.nn import functional

ROWS, FEATURES, CLASSES, CHUNK = 1024, 32, 4096, 64
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
# Bytes for some numbers per row, for the part of a weight that a CPU converts to float32 at a time,
# and for a row's exponentials per thread.
FEW = 96 * ROWS + 4 * CLASSES * FEATURES + 2**17


# Bytes per element of the sum that becomes the weight's gradient.
SUM = 4


@pytest.fixture(autouse=True, scope="module")
def workspaces(device):
    """Let cuBLAS allocate the workspaces that it keeps for forward's and backward's threads."""
    for dtype in (torch.bfloat16, torch.float32):
        batch_on(device, dtype).loss(chunk_rows=CHUNK).backward()


def batch_on(device, dtype, bias=False):
    return head(device, dtype, ROWS, FEATURES, CLASSES, bias=bias)


def size(tensor):
    return tensor.numel() * tensor.element_size()


def bytes_of_a_logit(device, dtype):
    """Return bytes of a float32 logit and its gradient, which has its own memory on a GPU."""
    return 6 if device.type == "cuda" and dtype == torch.bfloat16 else 4


def least(batch):
    """Return the bytes of the gradients of the hidden states and the weight."""
    return size(batch.hidden) + size(batch.weight)


def most(batch, dtype):
    chunk = bytes_of_a_logit(batch.hidden.device, dtype) * CHUNK * CLASSES
    return least(batch) + SUM * CLASSES * FEATURES + chunk + FEW


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_step_allocates_only_gradients_and_one_chunk(device, dtype, bias, upstream):
    batch = batch_on(device, dtype, bias)

    def step():
        loss = batch.loss(chunk_rows=CHUNK)
        loss.backward(torch.full_like(loss, upstream))

    assert least(batch) <= peak(device, step) <= most(batch, dtype)


@DTYPES
def test_loss_under_no_grad_allocates_only_one_chunk_of_logits(device, dtype):
    batch = batch_on(device, dtype)
    with torch.no_grad():
        needed = peak(device, lambda: batch.loss(chunk_rows=CHUNK))
    assert needed <= 4 * CHUNK * CLASSES + FEW


@DTYPES
def test_reduction_none_allocates_no_more_than_the_other_reductions(device, dtype):
    batch = batch_on(device, dtype)

    def step():
        batch.loss(chunk_rows=CHUNK, reduction="none").sum().backward()

    assert peak(device, step) <= most(batch, dtype)


@DTYPES
def test_only_gradients_in_their_own_dtypes_are_saved_for_backward(device, dtype):
    batch = batch_on(device, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        batch.loss(chunk_rows=CHUNK)
    assert sum(map(size, kept)) == least(batch) + 4  # and the scale that is baked into them


@pytest.mark.parametrize("features", [32, 256])
def test_single_chunk_needs_no_sum_of_weight_gradients(device, features):
    """The weight is larger than the logits. A CPU rounds its gradient by blocks of 4 MiB."""
    batch = head(device, torch.bfloat16, 4, features, 2**16, bias=False)
    block = 2**22 if device.type == "cpu" else 0
    logits = bytes_of_a_logit(device, torch.bfloat16) * 4 * 2**16
    few = FEW + 8 * 2**16 * torch.get_num_threads()
    needed = peak(device, lambda: batch.loss().backward())
    assert needed <= least(batch) + logits + block + few


@DTYPES
def test_peak_of_torchs_loss_is_measured_as_at_least_five_times_ours(device, dtype):
    batch = batch_on(device, dtype)

    def step():
        logits = functional.linear(batch.hidden, batch.weight)
        functional.cross_entropy(logits, batch.target).backward()

    ours = peak(device, lambda: batch_on(device, dtype).loss(chunk_rows=CHUNK).backward())
    assert peak(device, step) >= 5 * ours


def test_16_bit_probabilities_are_converted_one_chunk_at_a_time(device):
    probabilities = torch.rand(ROWS, CLASSES, device=device).bfloat16()
    batch = replace(batch_on(device, torch.bfloat16), target=probabilities)

    def step():
        batch.loss(chunk_rows=CHUNK).backward()

    converted = 4 * CHUNK * CLASSES
    assert peak(device, step) <= most(batch, torch.bfloat16) + converted
