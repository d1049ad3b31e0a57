"""An optimizer step in a CUDA graph, captured after one ordinary step without any option for it."""

import copy

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits, assert_same_state, feed, parameters, state_values

pytestmark = pytest.mark.needs_cuda

KINDS = {
    "float32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True, "maximize": True}),
    "bf16": (torch.bfloat16, {}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder", "state_dtype": torch.bfloat16}),
    "fp16, written back": (torch.float16, {"write_back_grads": True}),
}
EVERY_KIND = pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)
CUDA = torch.device("cuda")


class Twins:
    """Two equal models with equal optimizers; the steps of the first are replayed from a graph."""

    def __init__(self, dtype, **options):
        self.params, self.others = parameters(CUDA, dtype), parameters(CUDA, dtype)
        self.rates = [torch.tensor(1e-3, device=CUDA) for _ in range(2)]
        self.flags = [torch.zeros((), device=CUDA) for _ in range(2)]
        scale = torch.tensor(4.0, device=CUDA)
        self.optimizer, self.reference = (
            ampfuse.AdamW(params, lr=rate, max_grad_norm=1.0, **options)
            for params, rate in zip((self.params, self.others), self.rates, strict=True)
        )
        for optimizer, flag in zip((self.optimizer, self.reference), self.flags, strict=True):
            optimizer.grad_scale, optimizer.found_inf = scale, flag
        self.grads = self.take_a_step(0)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.optimizer.step()

    def take_a_step(self, step):
        """Take an ordinary step of both models and return the gradients of the first."""
        for params, optimizer in ((self.params, self.optimizer), (self.others, self.reference)):
            feed(params, step, scale=4.0)
            optimizer.step()
        return [param.grad for param in self.params]

    def replay(self, step, lr=1e-3, found_inf=0.0):
        """Step both models with new gradients, the first by replaying the graph."""
        feed(self.others, step, scale=4.0)
        for grad, other in zip(self.grads, self.others, strict=True):
            grad.copy_(other.grad)
        for rate, flag in zip(self.rates, self.flags, strict=True):
            rate.fill_(lr)
            flag.fill_(found_inf)
        self.graph.replay()
        self.reference.step()

    def assert_same(self):
        assert_same_bits(self.params, self.others)
        assert_same_bits(self.grads, [other.grad for other in self.others])
        assert_same_bits([self.optimizer.grad_norm], [self.reference.grad_norm])
        assert_same_state(self.optimizer, state_values(self.reference))


@EVERY_KIND
def test_replayed_steps_equal_eager_steps_bit_by_bit(dtype, options):
    twins = Twins(dtype, **options)

    for step, lr in enumerate((1e-3, 0.25, 1e-2), start=1):
        twins.replay(step, lr)
        twins.assert_same()

    assert twins.optimizer.state[twins.params[0]]["step"] == 4


@EVERY_KIND
def test_replayed_steps_are_skipped_when_found_inf_is_set(dtype, options):
    twins = Twins(dtype, **options)

    for step, found_inf in enumerate((1.0, 0.0, 2.0), start=1):
        twins.replay(step, found_inf=found_inf)
        twins.assert_same()

    assert twins.optimizer.state[twins.params[0]]["step"] == 2


@EVERY_KIND
def test_replayed_steps_continue_from_a_loaded_state(dtype, options):
    twins = Twins(dtype, **options)
    saved = copy.deepcopy(twins.reference.state_dict())
    values = [other.detach().clone() for other in twins.others]
    twins.replay(1)

    with torch.no_grad():
        for params in (twins.params, twins.others):
            torch._foreach_copy_(params, values)
    for optimizer, rate in zip((twins.optimizer, twins.reference), twins.rates, strict=True):
        optimizer.load_state_dict(saved)
        optimizer.param_groups[0]["lr"] = rate  # the tensor that the graph reads
    twins.replay(2)

    twins.assert_same()
