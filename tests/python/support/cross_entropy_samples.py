"""Arguments with which torch.library.opcheck calls the operators of cross-entropy."""

import torch


def rows(dtype, device, count=4, classes=6):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, classes, generator=generator).to(dtype).to(device)
    target = torch.randint(classes, (count,), generator=generator).to(device)
    return logits, target


# Values of `for_backward`: the data that forward computes for backward.
NOTHING = 0
STATISTICS = 1
GRADIENT = 2

SUM = 2  # zero for an empty batch; a mean would be NaN


def reduced(dtype, device, count):
    return *rows(dtype, device, count), None, SUM


def statistics_of(logits, target):
    results = torch.ops.ampfuse.cross_entropy_forward(
        logits, target, None, 1, -100, 0.0, None, None, 0.0, None, STATISTICS, False
    )
    return results[3], results[4]


def backward(dtype, device, count):
    logits, target = rows(dtype, device, count)
    upstream = torch.ones((), dtype=torch.promote_types(dtype, torch.float32), device=device)
    statistics, divisor = statistics_of(logits, target)
    return (upstream, logits, target, None, statistics, divisor, 1, -100, 0.0, 0.0, None)


def rescale(dtype, device, count):
    logits, _ = rows(dtype, device, count)
    one = torch.ones((), device=device)
    return logits, one, 3 * one.to(torch.promote_types(dtype, torch.float32))


CROSS_ENTROPY_SAMPLES = {
    "cross_entropy": lambda dtype, device, count: reduced(dtype, device, count),
    "cross_entropy.as_torch": lambda dtype, device, count: reduced(dtype, device, count),
    "cross_entropy.metrics": lambda dtype, device, count: reduced(dtype, device, count),
    "cross_entropy_forward": lambda dtype, device, count: (
        *rows(dtype, device, count),
        *(None, SUM, -100, 0.1, torch.ones((), device=device), None, 0.0, None, GRADIENT, True),
    ),
    "cross_entropy_backward": backward,
    "cross_entropy_rescale_": rescale,
}
