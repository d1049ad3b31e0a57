"""Unscaling, step and update in a CUDA graph: replays move the scale and skip steps."""

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits, feed, parameters
from scaler_languages import EVERY_LANGUAGE

pytestmark = pytest.mark.needs_cuda

CUDA = torch.device("cuda")
OPTIONS = {"growth_interval": 2, "history": 8, "max_consecutive_skips": 100}


class Side:
    """Parameters whose gradients are set by `feed`, their optimizer and scaler."""

    def __init__(self, language, clip, max_grad_norm):
        self.params, self.clip = parameters(CUDA), clip
        self.optimizer = language.adamw(self.params, lr=1e-2, max_grad_norm=max_grad_norm)
        self.scaler = language.scaler(CUDA, 4.0, **OPTIONS)
        self.feed(0)
        self.scaler.scale(torch.ones((), device=CUDA))
        self.step()
        self.grads = [param.grad for param in self.params]

    def feed(self, step, overflow=False):
        """Set new gradients; existing ones are overwritten in place, as a graph requires."""
        grads = [param.grad for param in self.params]
        feed(self.params, step, scale=4.0)
        if overflow:
            self.params[2].grad[17] = float("nan")
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                param.grad = grad.copy_(param.grad)

    def step(self):
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            ampfuse.clip_grad_norm_(self.params, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()


@EVERY_LANGUAGE
@pytest.mark.parametrize(("clip", "max_grad_norm"), [(False, None), (False, 0.5), (True, None)])
def test_replays_equal_eager_steps_bit_by_bit(language, clip, max_grad_norm):
    replayed, eager = (Side(language, clip, max_grad_norm) for _ in range(2))
    assert not replayed.scaler.was_skipped()  # from here on, each step copies its flag to the host
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed.step()

    for step in range(1, 12):
        overflow = step in (3, 4, 9)
        for side in (replayed, eager):
            side.feed(step, overflow)
        graph.replay()
        eager.step()
        assert replayed.scaler.was_skipped() == eager.scaler.was_skipped() == overflow
        assert replayed.scaler.get_scale() == eager.scaler.get_scale()

    assert_same_bits(replayed.params, eager.params)
    histories = [torch.tensor(side.scaler.history()) for side in (replayed, eager)]
    assert_same_bits(histories[:1], histories[1:])
    assert replayed.scaler.state_dict() == eager.scaler.state_dict()


@EVERY_LANGUAGE
def test_step_can_be_captured_once_the_scale_tensor_exists(language):
    params = parameters(CUDA)
    optimizer = language.adamw(params)
    feed(params, 0)
    optimizer.step()  # creates the optimizer's state
    scaler = language.scaler(CUDA, 4.0, growth_interval=1)
    scaler.scale_tensor()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.step(optimizer)
        scaler.update()

    for _ in range(3):
        graph.replay()

    assert scaler.get_scale() == 32.0
    assert scaler.state_dict()["_updates"] == 3
