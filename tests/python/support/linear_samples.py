"""Arguments with which torch.library.opcheck calls the operators of linear cross-entropy."""

import torch
from linear_reference import head

NONE, SUM = 0, 2  # finite for an empty batch; a mean would be NaN
WANTED = [True, True, True]


def rows(dtype, device, count):
    batch = head(device, dtype, rows=count, features=5, classes=7)
    return tuple(tensor.detach() for tensor in (batch.hidden, batch.weight, batch.bias)), (
        batch.target
    )


def dtypes(dtype):
    """Return the dtypes of products, of logits and of the weight's gradient."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return dtype, wide, wide if dtype == torch.float16 else dtype


def of_products(dtype):
    """Return dtypes, chunks, shard and mask, as both operators that take rows have them."""
    chunk_rows, chunk_classes, group, vocab_shard = 3, None, None, None
    return (*dtypes(dtype), chunk_rows, chunk_classes, group, vocab_shard, WANTED)


def forward(dtype, device, count, reduction=SUM):
    (hidden, weight, bias), target = rows(dtype, device, count)
    one = torch.ones((), device=device)
    options = (None, reduction, -100, 0.1, one, None, 1e-3, None)
    return (hidden, weight, bias, target, *options, *of_products(dtype), True)


def backward(dtype, device, count):
    results = torch.ops.ampfuse.linear_cross_entropy_forward(
        *forward(dtype, device, count, reduction=NONE)
    )
    tensors, target = rows(dtype, device, count)
    upstream = torch.ones(count, device=device, dtype=results[0].dtype)
    saved = (results[5], results[6])
    options = (NONE, -100, 0.1, 1e-3, None)
    return (upstream, *tensors, target, None, *saved, *options, *of_products(dtype))


def public(dtype, device, count):
    (hidden, weight, bias), target = rows(dtype, device, count)
    return hidden, weight, target, bias


LINEAR_SAMPLES = {
    "linear_cross_entropy": public,
    "linear_cross_entropy.metrics": public,
    "linear_cross_entropy_forward": forward,
    "linear_cross_entropy_backward": backward,
}

# Keyword-only arguments.
LINEAR_KEYWORDS = {
    "linear_cross_entropy": {"reduction": SUM, "chunk_rows": 3},
    "linear_cross_entropy.metrics": {"reduction": SUM, "chunk_rows": 3},
}
