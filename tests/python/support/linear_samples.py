"""Arguments with which torch.library.opcheck calls the operators of linear cross-entropy."""

import torch
from linear_reference import head

NONE, SUM = 0, 2  # finite for an empty batch; a mean would be NaN


def public(dtype, device, count):
    batch = head(device, dtype, rows=count, features=5, classes=7)
    tensors = batch.hidden, batch.weight, batch.target, batch.bias
    return tuple(tensor.detach() for tensor in tensors)


def of_products(dtype):
    """Return dtypes, chunks, shard and mask, as both operators that take rows have them."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    of_weight = wide if dtype == torch.float16 else dtype
    chunk_rows, chunk_classes, group, vocab_shard = 3, None, None, None
    wanted = [True, True, True]
    return dtype, wide, of_weight, chunk_rows, chunk_classes, group, vocab_shard, wanted


def forward(dtype, device, count, reduction=SUM):
    hidden, weight, target, bias = public(dtype, device, count)
    one = torch.ones((), device=device)
    options = (None, reduction, -100, 0.1, one, None, 1e-3, None)
    return (hidden, weight, bias, target, *options, *of_products(dtype), True)


def backward(dtype, device, count):
    arguments = forward(dtype, device, count, reduction=NONE)
    results = torch.ops.ampfuse.linear_cross_entropy_forward(*arguments)
    upstream = torch.ones(count, device=device, dtype=results[0].dtype)
    statistics, divisor = results[5:7]
    options = (NONE, -100, 0.1, 1e-3, None)
    return (upstream, *arguments[:4], None, statistics, divisor, *options, *of_products(dtype))


LINEAR_SAMPLES = {
    "linear_cross_entropy": public,
    "linear_cross_entropy.metrics": public,
    "linear_cross_entropy_forward": forward,
    "linear_cross_entropy_backward": backward,
}

# Keyword-only arguments.
LINEAR_KEYWORDS = {
    op: {"reduction": SUM, "chunk_rows": 3}
    for op in ("linear_cross_entropy", "linear_cross_entropy.metrics")
}
