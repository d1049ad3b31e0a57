"""Losses of a program without a scaler are scaled, and the program notices nothing."""

import pytest
import torch
from ampfuse.tools.precision.scaling import Scaling
from torch import nn


def backward(scaling, loss, params, upstream=None):
    losses = [loss]
    torch.autograd.backward(losses, scaling.begin(losses, upstream, params))
    scaling.end(params)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def test_gradients_are_those_without_a_scale_also_when_they_accumulate(model):
    params = list(model.parameters())
    batches = torch.randn(3, 5, 4)
    for batch in batches:
        model(batch).square().sum().backward()
    expected = [param.grad.clone() for param in params]
    model.zero_grad()
    scaling = Scaling(65536.0)
    for batch in batches:
        backward(scaling, model(batch).square().sum(), params)
    for param, gradient in zip(params, expected, strict=True):
        torch.testing.assert_close(param.grad, gradient, rtol=0, atol=0)  # 2**16 rounds nothing


def test_given_gradients_are_scaled_too(model):
    upstream = torch.randn(5, 2)
    output = model(torch.randn(5, 4))
    output.backward(upstream, retain_graph=True)
    expected = model.weight.grad.clone()
    model.zero_grad()
    backward(Scaling(8.0), output, list(model.parameters()), [upstream])
    torch.testing.assert_close(model.weight.grad, expected)


def test_small_gradients_survive_float16():
    weight = torch.ones(3, requires_grad=True)
    loss = weight.half().sum().float() * 1e-8
    loss.backward(retain_graph=True)
    assert not weight.grad.any()
    backward(Scaling(65536.0), loss, [weight])
    torch.testing.assert_close(weight.grad, torch.full((3,), 1e-8), rtol=1e-3, atol=0)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1.0])
def test_step_is_skipped_and_the_scale_halved_if_a_gradient_is_not_finite(model, number):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.ones(1, 4)).sum().backward()
    model.weight.grad[0, 0] = number
    gradient = model.weight.grad
    scaling = Scaling(1024.0)
    scaling.hide_overflow(list(model.parameters()))
    optimizer.step()
    scaling.restore()
    assert model.weight.grad is gradient
    is_finite = number == 1.0
    assert (scaling.skipped, scaling.scale) == ((0, 1024.0) if is_finite else (1, 512.0))
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, old) != is_finite


def test_steps_without_gradients_and_with_large_ones_are_taken():
    scaling = Scaling(1024.0)
    weight = nn.Parameter(torch.zeros(1000))
    scaling.hide_overflow([weight])
    weight.grad = torch.full((1000,), 3e38)  # whose sum is not finite
    scaling.hide_overflow([weight])
    assert scaling.skipped == 0
