"""A loss that makes weights NaN gives a hint at once, and no other loss does."""

import math
from contextlib import ExitStack

import ampfuse
import pytest
import torch
from ampfuse.tools.diagnosis.clock import StepClock
from ampfuse.tools.diagnosis.divergence import Divergence
from torch import nn


@pytest.fixture
def told():
    """Return a list of the hints that have come so far."""
    with ExitStack() as exits:
        hints = []
        StepClock(exits, Divergence(exits, hints.append))
        yield hints


def train(factors, *, scaler=None, is_guarded=False):
    """Make a step for each factor of the loss."""
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], 0.1)
    for factor in factors:
        optimizer.zero_grad()
        loss = factor * param.sum()
        if is_guarded and not loss.isfinite():
            continue
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_first_step_whose_loss_makes_weights_nan_is_named_once(told, factor):
    train([1.0, 1.0, factor, 1.0, 1.0])
    (hint,) = told
    assert hint.startswith(f"The loss of step 3 is {factor}, and weights are no longer finite: ")
    assert "lower the learning rate" in hint


def test_loss_that_is_not_finite_and_changes_no_weight_gives_no_hint(told):
    factors = [1.0, math.nan, 1.0, math.inf]
    train(factors, is_guarded=True)
    for make in (ampfuse.GradScaler, torch.amp.GradScaler):
        train(factors, scaler=make("cpu"))
    assert told == []
