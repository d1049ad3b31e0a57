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


# Bytes of a sum that becomes the weight's gradient.
SUM = 4


@pytest.fixture(autouse=True, scope="module")
def workspaces(device):
    """What cuBLAS takes at a thread's first product, forward's and backward's, and keeps."""
    for dtype in (torch.bfloat16, torch.float32):
        batch_on(device, dtype).loss(chunk_rows=CHUNK).backward()


def batch_on(device, dtype, bias=False):
    return head(device, dtype, ROWS, FEATURES, CLASSES, bias=bias)


def size(tensor):
    return tensor.numel() * tensor.element_size()


def bytes_of_a_logit(device, dtype):
    """In a chunk, with its gradient: of 16 bits it is beside float logits on a GPU."""
    return 6 if device.type == "cuda" and dtype == torch.bfloat16 else 4


def least(batch):
    """Gradients of the hidden states and the weight."""
    return size(batch.hidden) + size(batch.weight)


def most(batch, dtype):
    chunk = bytes_of_a_logit(batch.hidden.device, dtype) * CHUNK * CLASSES
    return least(batch) + SUM * CLASSES * FEATURES + chunk + FEW


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
def test_what_is_kept_for_backward_are_gradients_in_their_own_dtypes(device, dtype):
    batch = batch_on(device, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        batch.loss(chunk_rows=CHUNK)
    assert sum(map(size, kept)) == least(batch) + 4  # and what is baked into them


@pytest.mark.parametrize("features", [32, 256])
def test_a_single_chunk_needs_no_sum(device, features):
    """Of a weight that outweighs a few logits, beside what a CPU rounds at a time."""
    batch = head(device, torch.bfloat16, 4, features, 2**16, bias=False)
    block = 2**22 if device.type == "cpu" else 0
    logits = bytes_of_a_logit(device, torch.bfloat16) * 4 * 2**16
    few = FEW + 8 * 2**16 * torch.get_num_threads()
    needed = peak(device, lambda: batch.loss().backward())
    assert needed <= least(batch) + logits + block + few


@DTYPES
def test_torchs_would_be_seen_to_need_more(device, dtype):
    batch = batch_on(device, dtype)

    def step():
        logits = functional.linear(batch.hidden, batch.weight)
        functional.cross_entropy(logits, batch.target).backward()

    ours = peak(device, lambda: batch_on(device, dtype).loss(chunk_rows=CHUNK).backward())
    assert peak(device, step) >= 5 * ours
