"""A small training on several ranks, and the same training in one process."""

import copy

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits
from torch import nn
from torch.distributed.tensor import DTensor

STEPS = 4
OVERFLOWING = 1  # index of the step in which a gradient is infinite
SKIPPED = [step == OVERFLOWING for step in range(STEPS)]
SCALE = 2.0**10  # a power of two, by which losses are multiplied without rounding
CLIP = 0.1  # less than all norms, so each step clips
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def adamw(params, clip=None, **options):
    """Return an optimizer that clips in its step, unless `clip` does it before."""
    limit = CLIP if clip is None else None
    return ampfuse.AdamW(params, max_grad_norm=limit, **OPTIONS, **options)


def by_torch(params, scaler, optimizer):
    scaler.unscale_(optimizer)
    return torch.nn.utils.clip_grad_norm_(params, CLIP)


def by_ampfuse(params, scaler, optimizer):
    scaler.unscale_(optimizer)
    return ampfuse.clip_grad_norm_(params, CLIP)


def by_the_scaler(params, scaler, optimizer):
    return scaler.clip_grad_norm_(optimizer, CLIP)


# Functions that clip before a step, and return the norm of unscaled gradients.
CLIPS = {
    "clipped in the step": None,
    "clipped by torch": by_torch,
    "clipped by ampfuse": by_ampfuse,
    "clipped by the scaler": by_the_scaler,
}


def each(cases):
    """Parametrize a test with cases whose names are all that they consist of."""
    return pytest.mark.parametrize("case", cases, ids=lambda case: ", ".join(map(str, case)))


def batch(rank, step, part=0):
    """Return inputs and targets, different for each rank, step and micro-batch."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(6, 6, generator=generator), torch.randn(6, 4, generator=generator)


def loss_of(network, rank, step, part=0, autocast=None):
    inputs, targets = batch(rank, step, part)
    dtype = next(network.parameters()).dtype
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        outputs = network(inputs.to(dtype))
    return (outputs.float() - targets).square().mean()


def overflow(params):
    """Set the last element of the gradients, or of this rank's shards of them, to infinity."""
    shards = [local(param.grad) for param in params if param.grad is not None]
    [shard for shard in shards if shard.numel()][-1].view(-1)[-1] = torch.inf


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensors):
    """Return copies of tensors. All ranks get all of a DTensor."""
    every = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return [one.detach().clone() for one in every]


def train(optimizer, scaler, set_gradients, clip=None):
    """Take all steps, and return what happened in each, and all tensors at the end.

    Parameters alone would hide a wrong norm, because Adam divides by the size of gradients.
    """
    result = {"scales": [], "skipped": [], "norms": []}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    inner = getattr(optimizer, "optim", optimizer)  # in a ZeroRedundancyOptimizer
    for step in range(STEPS):
        optimizer.zero_grad()
        set_gradients(step)
        norm = None if clip is None else clip(params, scaler, optimizer)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        result["scales"].append(scaler.get_scale())
        result["skipped"].append(scaler.get_scale() < scale)
        result["norms"] += whole([inner.grad_norm if norm is None else norm])
    result["params"] = whole(params)
    states = [inner.state[param] for param in params if param in inner.state]
    for name in states[0]:
        result[name] = whole(state[name] for state in states)
    return result


def average_of(grads):
    return sum(grad / len(grads) for grad in grads)


def alone(network=None, *, ranks=2, parts=1, dtype=None, autocast=None, average=average_of):
    """Train in one process on the average of the gradients that the ranks have.

    `parts`: the micro-batches of each rank. `dtype`: dtype of the copies of parameters that forward
    and backward use. `average`: averages the gradients of a parameter.
    """
    network = model() if network is None else network
    params = list(network.parameters())
    optimizer, scaler = adamw(params), ampfuse.GradScaler("cpu", SCALE)

    def gradients(rank, step):
        used = copy.deepcopy(network).to(dtype or params[0].dtype)
        used.zero_grad()
        for part in range(parts):
            scaler.scale(loss_of(used, rank, step, part, autocast)).backward()
        return [param.grad for param in used.parameters()]

    def set_gradients(step):
        of_ranks = [gradients(rank, step) for rank in range(ranks)]
        for param, *grads in zip(params, *of_ranks, strict=True):
            if any(grad is not None for grad in grads):
                zeros = torch.zeros_like(param)
                param.grad = average([zeros if g is None else g.to(param.dtype) for g in grads])
        if step == OVERFLOWING:
            overflow(params)

    return train(optimizer, scaler, set_gradients)


def assert_like(result, expected, tolerance=None):
    """Compare two trainings, bit for bit if there is no tolerance."""
    assert result["skipped"] == expected["skipped"] == SKIPPED
    assert result["scales"] == expected["scales"]
    for name in expected.keys() - {"skipped", "scales"}:
        tensors, others = list(result[name]), list(expected[name])
        if name == "norms":  # if the host skips a step, the optimizer computes none
            del tensors[OVERFLOWING], others[OVERFLOWING]
        if tolerance is None:
            assert_same_bits(tensors, others)
        else:
            torch.testing.assert_close(tensors, others, rtol=tolerance, atol=tolerance)
