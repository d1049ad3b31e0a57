"""GradScaler on GPUs: steps in CUDA graphs, and parameters on a CPU and a GPU together."""

from itertools import product

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits, feed, parameters
from scaler_languages import EVERY_LANGUAGE, step_by
from torch.nn import Parameter

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
            self.params[2].grad[17] = torch.nan
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                param.grad = grad.copy_(param.grad)

    def step(self):
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            ampfuse.clip_grad_norm_(self.params, 0.5)
        step_by(self.scaler, self.optimizer)


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
        step_by(scaler, optimizer)

    for _ in range(3):
        graph.replay()

    assert scaler.get_scale() == 32.0
    assert scaler.state_dict()["_updates"] == 3


# The scaler combines the overflow flags of all devices, whichever comes first.
ORDERS = pytest.mark.parametrize("order", [("cpu", "cuda"), ("cuda", "cpu")])


def on_both(order):
    return [Parameter(torch.ones(2, device=device)) for device in order]


@EVERY_LANGUAGE
@ORDERS
@pytest.mark.parametrize(
    ("optimizer", "limit"), [("sgd", {}), ("adamw", {}), ("adamw", {"max_grad_norm": 1.0})]
)
def test_an_overflow_on_one_device_skips_on_both(language, order, optimizer, limit):
    for unscale, spoiled in product((False, True), ((), (0,), (1,), (0, 1))):
        params = on_both(order)
        stepped = getattr(language, optimizer)(params, lr=0.5, **limit)
        scaler = language.scaler(torch.device(order[0]), 8.0)
        for param in params:
            scaler.scale(param.sum()).backward()
        for index in spoiled:
            params[index].grad[0] = torch.inf

        step_by(scaler, stepped, unscale=unscale)

        assert scaler.was_skipped() == bool(spoiled), (unscale, spoiled)
        assert scaler.get_scale() == (4.0 if spoiled else 8.0)
        for param in params:
            assert torch.equal(param.detach().cpu(), torch.ones(2)) == bool(spoiled)


@EVERY_LANGUAGE
@ORDERS
def test_history_and_overflow_report_cover_all_devices(language, order):
    params = on_both(order)
    optimizer = language.sgd(params, lr=0.5)
    scaler = language.scaler(torch.device(order[0]), 8.0, history=2)
    for step in range(2):
        optimizer.zero_grad()
        for param in params:
            scaler.scale(param.sum()).backward()
        if step == 1:
            params[1].grad[0] = torch.nan
        step_by(scaler, optimizer)

    assert scaler.history()[0].norm == pytest.approx(2.0)
    assert scaler.history()[1].skipped
    assert scaler.overflow_report(torch.nn.ParameterList(params)) == ["1"]
