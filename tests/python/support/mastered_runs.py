"""Parameters of 16 bits or more, their gradients and steps, for the tests of `ampfuse.Mastered`."""

import torch
from ampfuse import Mastered
from optim_models import assert_same_bits
from torch.nn import Parameter

BF16 = torch.bfloat16
SCALE, MAX_NORM = 2.0**10, 2.0
SHAPES = [(9, 5), (4, 6)]  # Muon takes matrices only


def made(device, dtype=torch.float32):
    """Return parameters whose values every dtype can hold."""
    torch.manual_seed(0)
    return [Parameter(torch.randn(one).to(BF16).to(device, dtype)) for one in SHAPES]


def feed(params, step, scale=1.0):
    """Set the gradients of a step, which every dtype can hold at the scale of the tests, too."""
    torch.manual_seed(step)
    for param in params:
        grad = torch.randn(param.shape).to(BF16).to(param.device, param.dtype)
        param.grad = grad * scale


def train(optimizer, params, steps, scaler=None):
    for step in steps:
        if scaler is None:
            feed(params, step)
            optimizer.step()
            continue
        scaler.scale(torch.zeros((), device=params[0].device))  # makes the scale
        feed(params, step, scaler.get_scale() if step != 3 else float("inf"))
        scaler.step(optimizer)
        scaler.update()


def assert_all_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one.detach(), other.detach())


def made_with_optimizer(dtype):
    params = made("cpu", dtype)
    return Mastered(torch.optim.NAdam, params, max_grad_norm=MAX_NORM), params
