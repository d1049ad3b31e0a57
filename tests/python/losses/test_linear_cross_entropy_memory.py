"""Tests of the memory of linear_cross_entropy: gradients, and one chunk of logits."""

from collections import Counter
from dataclasses import replace

import ampfuse
import pytest
import torch
from ampfuse import _C
from harness.memory import extra_peak as peak
from linear_reference import head
from torch.profiler import ProfilerActivity, profile

BFLOAT16, FLOAT = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
ROWS, FEATURES, CLASSES, CHUNK = 1024, 32, 4096, 64
DTYPES = pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT])
# Bytes for some numbers per row, for the part of a weight that a CPU converts to float32 at a time,
# and for a row's exponentials per thread.
FEW = 96 * ROWS + 4 * CLASSES * FEATURES + 2**17
# Bytes per element of the sum that becomes the weight's gradient.
SUM = 4


@pytest.fixture(autouse=True, scope="module")
def workspaces(device):
    """Let cuBLAS allocate the workspaces that it keeps for forward's and backward's threads."""
    for dtype in (BFLOAT16, FLOAT):
        batch_on(device, dtype).loss(chunk_rows=CHUNK).backward()


def batch_on(device, dtype, bias=False):
    return head(device, dtype, ROWS, FEATURES, CLASSES, bias=bias)


def bytes_of_a_logit(device, dtype):
    """Return bytes of a float32 logit and its gradient, which has its own memory on a GPU."""
    return 6 if device.type == "cuda" and dtype == BFLOAT16 else 4


def least(batch):
    """Return the bytes of the gradients of the hidden states and the weight."""
    return batch.hidden.nbytes + batch.weight.nbytes


def most(batch, dtype):
    chunk = bytes_of_a_logit(batch.hidden.device, dtype) * CHUNK * CLASSES
    return least(batch) + SUM * CLASSES * FEATURES + chunk + FEW


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("upstream", [1.0, 3.0])
def test_step_allocates_only_gradients_and_one_chunk(device, dtype, bias, upstream):
    batch = batch_on(device, dtype, bias)

    def step(**options):
        loss = batch.loss(chunk_rows=CHUNK, **options)
        loss.backward(torch.full_like(loss, upstream))

    assert least(batch) <= peak(device, step) <= most(batch, dtype)
    assert peak(device, lambda: step(reduction="none")) <= most(batch, dtype)


@DTYPES
def test_loss_under_no_grad_allocates_only_one_chunk_of_logits(device, dtype):
    batch = batch_on(device, dtype)
    with torch.no_grad():
        needed = peak(device, lambda: batch.loss(chunk_rows=CHUNK))
    assert needed <= 4 * CHUNK * CLASSES + FEW


@DTYPES
def test_only_gradients_in_their_own_dtypes_are_saved_for_backward(device, dtype):
    batch = batch_on(device, dtype)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda _: None):
        batch.loss(chunk_rows=CHUNK)
    assert (
        sum(tensor.nbytes for tensor in kept) == least(batch) + 4
    )  # and the scale that is baked into them


@pytest.mark.parametrize("features", [32, 256])
def test_single_chunk_needs_no_sum_of_weight_gradients(device, features):
    """The weight is larger than the logits. A CPU rounds its gradient by blocks of 4 MiB."""
    batch = head(device, BFLOAT16, 4, features, 2**16, bias=False)
    block = 2**22 if device.type == "cpu" else 0
    logits = bytes_of_a_logit(device, BFLOAT16) * 4 * 2**16
    few = FEW + 8 * 2**16 * torch.get_num_threads()
    needed = peak(device, lambda: batch.loss().backward())
    assert needed <= least(batch) + logits + block + few


def test_16_bit_probabilities_are_converted_one_chunk_at_a_time(device):
    probabilities = torch.rand(ROWS, CLASSES, device=device).bfloat16()
    batch = replace(batch_on(device, BFLOAT16), target=probabilities)
    needed = peak(device, lambda: batch.loss(chunk_rows=CHUNK).backward())
    converted = 4 * CHUNK * CLASSES
    assert needed <= most(batch, BFLOAT16) + converted


@pytest.mark.parametrize(("classes", "rows"), [(50257, 320), (200_000, 128)])
def test_default_chunk_on_a_cpu_has_64_mib_of_logits_or_128_rows(classes, rows):
    batch = head(CPU, BFLOAT16, 400, 4, classes, bias=False)

    @torch.no_grad()
    def held(**options):
        return peak(CPU, lambda: batch.loss(**options))

    a_row = held(chunk_rows=rows + 1) - held(chunk_rows=rows)
    assert a_row >= 4 * classes
    assert abs(held() - held(chunk_rows=rows)) < a_row / 2


def test_chunk_classes_takes_the_memory_of_one_tile_and_the_gradients(device):
    classes, tile = 8192, 256
    batch = head(device, BFLOAT16, ROWS, FEATURES, classes, bias=False)
    logits = 6 * ROWS * tile
    sums = 4 * ROWS * FEATURES
    partials = 8 * 16 * ROWS * (classes // tile)
    # A CPU converts some of the weight to float32 for its products.
    few = 128 * ROWS + 4 * classes * FEATURES + 2**17
    needed = peak(device, lambda: batch.loss(chunk_classes=tile).backward())
    assert needed <= least(batch) + logits + sums + partials + few


def test_16_bit_logits_need_no_more_memory_than_float32_ones(device):
    batch = head(device, BFLOAT16, 512, FEATURES, CLASSES, bias=False)

    def bytes_with(dtype):
        options = {"chunk_rows": 256, "logits_dtype": dtype}
        return peak(device, lambda: batch.loss(**options).backward())

    few = 2**17
    saved = 256 * CLASSES * (4 if device.type == "cuda" else 0)  # a CPU rounds float32 products
    bytes_with(BFLOAT16)  # allocates workspaces
    assert bytes_with(BFLOAT16) <= bytes_with(FLOAT) - saved + few + 4 * 2**20


# --- the estimate, which ampfuse.memory reads -----------------------------------------------------

ESTIMATED = {
    "float32": (1024, FLOAT, FLOAT, {}),
    "chunks": (4096, FLOAT, FLOAT, {}),
    "rows of a chunk": (1024, FLOAT, FLOAT, {"chunk_rows": 100}),
    "tiles of classes": (1024, FLOAT, FLOAT, {"chunk_classes": 2048}),
    "bfloat16": (1024, BFLOAT16, BFLOAT16, {}),
    "bfloat16 tiles": (4096, BFLOAT16, BFLOAT16, {"chunk_classes": 2048}),
    "bfloat16 chunks": (4096, BFLOAT16, BFLOAT16, {}),
    "converted weight": (1024, BFLOAT16, FLOAT, {}),
}


@pytest.mark.parametrize(
    ("rows", "dtype", "weight_dtype", "chunks"), ESTIMATED.values(), ids=list(ESTIMATED)
)
def test_workspace_is_the_memory_that_the_loss_allocates(rows, dtype, weight_dtype, chunks):
    classes, features = 8192, 128
    hidden = torch.randn(rows, features, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, features, dtype=weight_dtype, requires_grad=True)
    target = torch.randint(classes, (rows,))

    def loss():
        with torch.autocast("cpu", BFLOAT16, enabled=dtype != weight_dtype):
            return ampfuse.linear_cross_entropy(hidden, weight, target, **chunks)

    options = {"dtype": dtype, "logits_dtype": FLOAT, "weight_grad_dtype": dtype}
    options |= {"with_gradient": True, "on_gpu": False, "chunk_rows": None, "chunk_classes": None}
    said = _C.linear_cross_entropy_workspace(hidden, weight, **options | chunks)
    results = (rows + classes) * features * dtype.itemsize
    assert said + results == pytest.approx(peak(CPU, loss), rel=0.05)


def test_on_a_gpu_all_rows_share_one_chunk_of_16_bit_logits_if_that_takes_less():
    hidden = torch.empty(4096, 4096, dtype=BFLOAT16, device="meta")
    weight = torch.empty(128_256, 4096, dtype=BFLOAT16, device="meta")
    options = {"dtype": BFLOAT16, "logits_dtype": BFLOAT16, "weight_grad_dtype": BFLOAT16}
    options |= {"with_gradient": True, "on_gpu": True, "chunk_rows": None}
    whole = _C.linear_cross_entropy_workspace(hidden, weight, chunk_classes=None, **options)
    assert whole == 4096 * 128_256 * 2
    options["logits_dtype"] = FLOAT
    tiles = _C.linear_cross_entropy_workspace(hidden, weight, chunk_classes=4096, **options)
    of_logits, of_hidden_sum = 4096 * 4096 * (4 + 2), 4096 * 4096 * 4
    of_rows = 4096 * 32 * (11 + 1) * 8  # eleven partial sums and a target per row and tile
    assert tiles == of_logits + of_hidden_sum + of_rows


def test_tiles_look_up_targets_and_join_partial_sums_once_for_all_tiles():
    def operators(classes):
        batch = head(torch.device("cpu"), FLOAT, classes=classes)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            batch.grads(batch.loss(chunk_classes=32))
        return Counter(event.name for event in seen.events())

    few, many = operators(64), operators(32 * 12)
    assert many["aten::addmm"] - few["aten::addmm"] >= 20
    for name in ("aten::where", "aten::eq", "aten::ge", "aten::lt", "aten::sub", "aten::full"):
        assert many[name] == few[name], name
