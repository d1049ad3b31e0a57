"""Logits and targets, and arguments with which torch.library.opcheck calls the operators."""

import torch

# Values of `for_backward`: the data that forward computes for backward.
STATISTICS, GRADIENT = 1, 2
SUM = 2  # zero for an empty batch; a mean would be NaN


def batch(device, shape=(6, 50), dtype=torch.float32, scale=1.0, seed=0, *, leaf=True):
    """Return logits of normally distributed numbers times `scale`, and class targets."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=generator) * scale).to(device, dtype)
    classes, rows = (shape[1], shape[:1] + shape[2:]) if len(shape) > 1 else (shape[0], ())
    target = torch.randint(max(1, classes), rows, generator=generator)
    return logits.requires_grad_(leaf), target.to(device)


def reduced(dtype, device, count):
    return *batch(device, (count, 6), dtype, leaf=False), None, SUM


def statistics_of(logits, target):
    results = torch.ops.ampfuse.cross_entropy_forward(
        logits, target, None, 1, -100, 0.0, None, None, 0.0, None, STATISTICS, False
    )
    return results[3], results[4]


def forward(dtype, device, count):
    options = (None, SUM, -100, 0.1, torch.ones((), device=device), None, 0.0, None, GRADIENT, True)
    return *batch(device, (count, 6), dtype, leaf=False), *options


def backward(dtype, device, count):
    logits, target = batch(device, (count, 6), dtype, leaf=False)
    upstream = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), device=device)
    statistics, divisor = statistics_of(logits, target)
    return (upstream, logits, target, None, statistics, divisor, 1, -100, 0.0, 0.0, None)


def rescale(dtype, device, count):
    logits, _ = batch(device, (count, 6), dtype, leaf=False)
    one = torch.ones((), device=device)
    return logits, one, 3 * one.to(torch.promote_types(dtype, torch.float32))


CROSS_ENTROPY_SAMPLES = {
    "cross_entropy": reduced,
    "cross_entropy.as_torch": reduced,
    "cross_entropy.metrics": reduced,
    "cross_entropy_forward": forward,
    "cross_entropy_backward": backward,
    "cross_entropy_rescale_": rescale,
}
