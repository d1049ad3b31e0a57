"""The memory that linear cross-entropy is said to take is the memory that it allocates."""

import ampfuse
import pytest
import torch
from ampfuse import _C
from harness.memory import extra_peak

CPU = torch.device("cpu")
CASES = {
    "float32": (1024, torch.float32, torch.float32, {}),
    "chunks": (4096, torch.float32, torch.float32, {}),
    "rows of a chunk": (1024, torch.float32, torch.float32, {"chunk_rows": 100}),
    "tiles of classes": (1024, torch.float32, torch.float32, {"chunk_classes": 2048}),
    "bfloat16": (1024, torch.bfloat16, torch.bfloat16, {}),
    "bfloat16 tiles": (4096, torch.bfloat16, torch.bfloat16, {"chunk_classes": 2048}),
    "bfloat16 chunks": (4096, torch.bfloat16, torch.bfloat16, {}),
    "converted weight": (1024, torch.bfloat16, torch.float32, {}),
}


@pytest.mark.parametrize(
    ("rows", "dtype", "weight_dtype", "chunks"), CASES.values(), ids=list(CASES)
)
def test_workspace_is_the_memory_that_the_loss_allocates(rows, dtype, weight_dtype, chunks):
    classes, features = 8192, 128
    hidden = torch.randn(rows, features, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, features, dtype=weight_dtype, requires_grad=True)
    target = torch.randint(classes, (rows,))

    def loss():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype != weight_dtype):
            return ampfuse.linear_cross_entropy(hidden, weight, target, **chunks)

    said = _C.linear_cross_entropy_workspace(
        hidden,
        weight,
        dtype=dtype,
        logits_dtype=torch.float32,
        weight_grad_dtype=dtype,
        chunk_rows=chunks.get("chunk_rows"),
        chunk_classes=chunks.get("chunk_classes"),
        with_gradient=True,
        on_gpu=False,
    )
    results = rows * features * dtype.itemsize + classes * features * dtype.itemsize
    assert said + results == pytest.approx(extra_peak(CPU, loss), rel=0.05)


def test_on_a_gpu_all_rows_share_one_chunk_of_16_bit_logits_if_that_takes_less():
    hidden = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128_256, 4096, dtype=torch.bfloat16, device="meta")
    options = {
        "dtype": torch.bfloat16,
        "logits_dtype": torch.bfloat16,
        "weight_grad_dtype": torch.bfloat16,
        "chunk_rows": None,
        "with_gradient": True,
        "on_gpu": True,
    }
    whole = _C.linear_cross_entropy_workspace(hidden, weight, chunk_classes=None, **options)
    assert whole == 4096 * 128_256 * 2
    options["logits_dtype"] = torch.float32
    tiles = _C.linear_cross_entropy_workspace(hidden, weight, chunk_classes=4096, **options)
    of_logits, of_hidden_sum = 4096 * 4096 * (4 + 2), 4096 * 4096 * 4
    of_partials = 4096 * 32 * 11 * 8  # eleven numbers per row and tile
    assert tiles == of_logits + of_hidden_sum + of_partials
