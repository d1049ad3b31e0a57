"""Mistakes that a program repeats in each step."""

import sys
import types
from collections import Counter
from contextlib import ExitStack

import pytest
import torch
from ampfuse.diagnosis._clock import StepClock
from ampfuse.diagnosis._habits import Habits
from torch import nn


@pytest.fixture
def habits():
    with ExitStack() as exits:
        made = Habits()
        StepClock(exits, made)
        yield made


def train(reset, *, parts=1, steps=12):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for _ in range(parts):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        reset(model, optimizer)


def set_to_none(model, optimizer):
    optimizer.zero_grad()


def set_to_zero(model, optimizer):
    optimizer.zero_grad(set_to_none=False)


def zero_by_the_model(model, optimizer):
    model.zero_grad(set_to_none=False)


def delete(model, optimizer):
    for param in model.parameters():
        param.grad = None


def zero_each(model, optimizer):
    for param in model.parameters():
        param.grad.zero_()


def zero_data(model, optimizer):
    for param in model.parameters():
        param.grad.data.zero_()


def keep(model, optimizer):
    pass


def test_anomaly_checks_are_counted_although_gradients_are_kept(habits):
    with torch.autograd.set_detect_anomaly(True):
        train(keep, steps=15)
    assert habits.keeps_gradients
    assert habits.anomaly_checks == 15


RESETS = [set_to_none, set_to_zero, zero_by_the_model, delete, zero_each, zero_data]


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("reset", RESETS)
def test_gradients_that_are_reset_are_not_reported(habits, reset, parts):
    train(reset, parts=parts)
    assert not habits.keeps_gradients


@pytest.mark.parametrize("parts", [1, 3])
def test_gradients_that_are_never_reset_are_reported(habits, parts):
    train(lambda model, optimizer: None, parts=parts)
    assert habits.keeps_gradients


def test_gradients_that_another_loss_adds_to_before_they_are_reset_are_not_reported(habits):
    critic, generator = nn.Linear(4, 1), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (critic, generator)]
    for _ in range(12):
        optimizers[0].zero_grad(set_to_none=False)
        critic(torch.ones(2, 4)).sum().backward()
        optimizers[0].step()
        optimizers[1].zero_grad(set_to_none=False)
        critic(generator(torch.ones(2, 4))).sum().backward()  # also into the critic's gradients
        optimizers[1].step()
    assert not habits.keeps_gradients


def test_backward_in_a_closure_is_not_reported(habits):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(12):
        optimizer.step(closure)
    assert not habits.keeps_gradients


def test_steps_without_backward_are_not_reported(habits):
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer = torch.optim.SGD([param], lr=0.1)
    for _ in range(12):
        optimizer.step()
    assert not habits.keeps_gradients


def test_sparse_gradients_are_left_alone(habits):
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    for _ in range(12):
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    assert not habits.keeps_gradients


def test_anomaly_checks_are_counted(habits):
    train(set_to_none, steps=3)
    with torch.autograd.set_detect_anomaly(True):
        train(set_to_none, steps=4)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        with torch.autograd.detect_anomaly(check_nan=False):  # as it is mostly used
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert habits.anomaly_checks == 4 + 3


def test_compilations_after_the_first_steps_are_counted(habits, monkeypatch):
    graphs = Counter()
    dynamo = types.SimpleNamespace(counters={"stats": graphs})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)

    def compile_in(steps):
        taken = iter(range(100))

        def after(model, optimizer):
            set_to_none(model, optimizer)
            graphs["unique_graphs"] += next(taken) in steps

        return after

    train(compile_in({0, 1}))
    assert habits.compilations == 0
    train(compile_in({5, 6, 7}))
    assert habits.compilations == 3
