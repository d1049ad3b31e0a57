"""What linear_cross_entropy allocates: gradients, and a chunk of logits."""

import pytest
import torch
from harness.memory import extra_peak as peak
from linear_reference import head
from torch.nn import functional

ROWS, FEATURES, CLASSES, CHUNK = 1024, 32, 4096, 64
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
# Numbers for each row, what CPUs widen of a weight, and a row's exponentials for each thread.
FEW = 96 * ROWS + 4 * CLASSES * FEATURES + 2**17


# Bytes of a sum that becomes the weight's gradient, and of a logit in a chunk with its gradient.
SUM = 4
LOGIT = {torch.float32: 4, torch.bfloat16: 6}


def batch_on(device, dtype, bias=False):
    return head(device, dtype, ROWS, FEATURES, CLASSES, bias=bias)


def size(tensor):
    return tensor.numel() * tensor.element_size()


def least(batch):
    """Gradients of the hidden states and the weight."""
    return size(batch.hidden) + size(batch.weight)


def most(batch, dtype):
    return least(batch) + SUM * CLASSES * FEATURES + LOGIT[dtype] * CHUNK * CLASSES + FEW


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_a_step_holds_gradients_and_a_chunk(device, dtype, bias, upstream):
    batch = batch_on(device, dtype, bias)

    def step():
        loss = batch.loss(chunk_rows=CHUNK)
        loss.backward(torch.full_like(loss, upstream))

    assert least(batch) <= peak(device, step) <= most(batch, dtype)


@DTYPES
def test_without_a_gradient_there_is_a_chunk_of_logits(device, dtype):
    batch = batch_on(device, dtype)
    with torch.no_grad():
        needed = peak(device, lambda: batch.loss(chunk_rows=CHUNK))
    assert needed <= 4 * CHUNK * CLASSES + FEW


@DTYPES
def test_reduction_none_needs_no_more(device, dtype):
    batch = batch_on(device, dtype)

    def step():
        batch.loss(chunk_rows=CHUNK, reduction="none").sum().backward()

    assert peak(device, step) <= most(batch, dtype)


@DTYPES
def test_torchs_would_be_seen_to_need_more(device, dtype):
    batch = batch_on(device, dtype)

    def step():
        logits = functional.linear(batch.hidden, batch.weight)
        functional.cross_entropy(logits, batch.target).backward()

    ours = peak(device, lambda: batch_on(device, dtype).loss(chunk_rows=CHUNK).backward())
    assert peak(device, step) >= 5 * ours
