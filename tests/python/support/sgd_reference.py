"""Inputs for tests of `fused_sgd`, and a step of SGD in float64, without ampfuse."""

import itertools
from dataclasses import dataclass, fields

import torch
from adam_reference import Dtypes, join, split
from ampfuse.ops import fused_sgd
from reference import heavy_tailed
from torch import Tensor

# momentum, dampening, nesterov, weight_decay, maximize; torch refuses Nesterov with dampening
SETTINGS = [
    dict(
        momentum=momentum,
        dampening=dampening,
        nesterov=nesterov,
        weight_decay=decay,
        maximize=maximize,
    )
    for momentum, dampening, nesterov in [(0, 0, 0), (0.9, 0, 0), (0.9, 0.25, 0), (0.9, 0, 1)]
    for decay, maximize in itertools.product((0.0, 0.05), (False, True))
]
for setting in SETTINGS:
    setting["nesterov"] = bool(setting["nesterov"])

LISTS = ["params", "grads", "momentum_buffers", "state_steps", "masters"]
FLOAT32 = Dtypes()


@dataclass
class SgdLists:
    """Lists that a step reads and writes; entries with the same index belong to one parameter."""

    params: list[Tensor]
    grads: list[Tensor]
    momentum_buffers: list[Tensor]
    state_steps: list[Tensor]
    masters: list[Tensor]

    def columns(self):
        """Return the lists, in the order in which the op takes them."""
        return [getattr(self, field.name) for field in fields(self)]

    def clone(self):
        """Return a copy that shares no memory with this."""
        return SgdLists(*([x.clone() for x in column] for column in self.columns()))

    def stepped(self):
        """Return the values that a step updates: the masters if present, else the parameters."""
        if not self.masters:
            return self.params
        pairs = zip(self.params, self.masters, strict=True)
        return [join(p, x) if x.dtype == torch.int16 else x for p, x in pairs]


def sgd_lists(shapes, device, dtypes=FLOAT32, *, momentum=0.9, steps=0, maximize=False):
    """Return lists of heavy-tailed numbers whose sums do not cancel in a step, except the last."""
    lists = SgdLists([], [], [], [], [])
    wide = torch.float64 if dtypes.param == torch.float64 else torch.float32
    for i, shape in enumerate(shapes):
        value, grad, buffer = (heavy_tailed(shape, wide, device, seed=10 * i + k) for k in range(3))
        sign = value.sign()
        value += sign
        lists.grads.append((grad.abs() * (-sign if maximize else sign)).to(dtypes.grad))
        if momentum:
            lists.momentum_buffers.append((buffer.abs() * sign).to(dtypes.moment))
            lists.state_steps.append(torch.tensor(float(steps), device=device))
        if dtypes.master == torch.int16:
            param, remainder = split(value)
            lists.params.append(param)
            lists.masters.append(remainder)
            continue
        lists.params.append(value.to(dtypes.param))
        if dtypes.master is not None:
            lists.masters.append(value)
    return lists


def step(lists, lr=1e-3, **options):
    """Take one step; a number is passed as a float64 tensor on the CPU."""
    rate = lr if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float64)
    fused_sgd(*lists.columns(), lr=rate, **options)


def exact_step(
    lists, lr, grad_factor=1.0, *, momentum, dampening, nesterov, weight_decay, maximize
):
    """Return new values and buffers in float64."""
    values, buffers = [], []
    for i, value in enumerate(x.double() for x in lists.stepped()):
        grad = lists.grads[i].double() * grad_factor
        grad = (-grad if maximize else grad) + weight_decay * value
        if momentum:
            old = lists.momentum_buffers[i].double()
            is_first = lists.state_steps[i].item() == 0
            buffers.append(grad if is_first else momentum * old + (1 - dampening) * grad)
            grad = grad + momentum * buffers[-1] if nesterov else buffers[-1]
        values.append(value - lr * grad)
    return values, buffers


def assert_takes_exact_step(lists, lr=1e-3, *, grad_scale=None, **options):
    """Take a step, and check all results against float64: a few roundings of the arithmetic, and
    one to the tensor's dtype."""
    factor = 1.0 if grad_scale is None else 1 / grad_scale.item()
    before = [x.double().clone() for x in lists.stepped()]
    steps = [x.item() for x in lists.state_steps]
    values, buffers = exact_step(lists, lr, factor, **options)

    step(lists, lr, grad_scale=grad_scale, **options)

    assert [x.item() for x in lists.state_steps] == [count + 1 for count in steps]
    for old, found, exact in zip(before, lists.stepped(), values, strict=True):
        unit = torch.finfo(torch.float64 if found.dtype == torch.float64 else torch.float32).eps
        rounding = torch.finfo(found.dtype).eps / 2 * exact.abs()
        rounding = rounding.clamp(min=torch.finfo(found.dtype).smallest_normal)
        arithmetic = 4 * unit * (exact.abs() + (exact - old).abs())
        assert ((found.double() - exact).abs() <= arithmetic + rounding).all()
    for found, exact in zip(lists.momentum_buffers, buffers, strict=True):
        unit = torch.finfo(found.dtype).eps if found.dtype != torch.bfloat16 else 2**-23
        rounding = torch.finfo(found.dtype).eps / 2 * exact.abs()
        rounding = rounding.clamp(min=torch.finfo(found.dtype).smallest_normal)
        assert ((found.double() - exact).abs() <= 4 * unit * exact.abs() + rounding).all()
