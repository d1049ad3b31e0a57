"""Inputs for tests of `fused_adam`, and a step of Adam or AdamW in float64.

The exact step does without ampfuse. Its formulae are those of torch.optim's documentation; t is
the number of the step:

    g ← −g if maximize;  g ← g + λ·p (Adam) or p ← p − lr·λ·p (AdamW)
    m ← β₁·m + (1−β₁)·g;  v ← β₂·v + (1−β₂)·g²;  with amsgrad, the largest v so far replaces v
    p ← p − lr·m̂ / (√v̂ + ε)  with m̂ = m/(1−β₁ᵗ), v̂ = v/(1−β₂ᵗ)
"""

from dataclasses import dataclass, fields, replace

import pytest
import torch
from ampfuse.ops import fused_adam
from reference import heavy_tailed, same_bits
from torch import Tensor

# The weight decay is large enough to be visible in float16.
OPTIONS = {
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.05,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
    "decoupled_weight_decay": True,
}


LISTS = ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps", "masters"]
SCALARS = ["lr", "found_inf", "grad_scale", "total_norm", "grad_norm"]


def valid_arguments(device):
    """Return arguments with which a step changes every tensor that it may write."""
    lists = {name: [torch.full((3,), 6.0, device=device) for _ in range(3)] for name in LISTS}
    for name in ("params", "grads"):
        lists[name] = [x.bfloat16() for x in lists[name]]
    lists["state_steps"] = [torch.tensor(4.0, device=device) for _ in range(3)]
    scalars = {name: torch.tensor(0.5, device=device) for name in SCALARS}
    scalars["found_inf"] = torch.zeros((), device=device)
    options = OPTIONS | {"amsgrad": True, "write_back_grads": True, "max_norm": 0.25}
    return lists | scalars | options


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of one parameter and of its gradient, moments and master."""

    param: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    moment: torch.dtype = torch.float32
    master: torch.dtype | None = None

    def __str__(self):
        names = [str(x).removeprefix("torch.") for x in (self.param, self.grad, self.moment)]
        return "-".join([*names, str(self.master).removeprefix("torch.")])


DTYPES_16_BIT = [torch.float16, torch.bfloat16]
SINGLE = [*DTYPES_16_BIT, torch.float32]
DOUBLE = Dtypes(torch.float64, torch.float64, torch.float64)
HALF_WITH_MASTERS = Dtypes(torch.float16, torch.float16, master=torch.float32)
BFLOAT16_WITH_MASTERS = Dtypes(torch.bfloat16, torch.bfloat16, master=torch.float32)
BFLOAT16_WITH_REMAINDERS = Dtypes(torch.bfloat16, torch.bfloat16, master=torch.int16)

# All combinations that the op accepts.
COMBINATIONS = [
    Dtypes(param, grad, moment, master)
    for param, master in [
        *((param, None) for param in SINGLE),
        *((param, torch.float32) for param in DTYPES_16_BIT),
        (torch.bfloat16, torch.int16),
    ]
    for grad in SINGLE
    for moment in (torch.float32, torch.bfloat16)
] + [DOUBLE]

# All kinds of parameters and masters, with the dtypes that gradients and moments usually have.
WITH_MASTERS = [HALF_WITH_MASTERS, BFLOAT16_WITH_MASTERS, BFLOAT16_WITH_REMAINDERS]
KINDS = [Dtypes(), DOUBLE, *WITH_MASTERS]

EVERY_COMBINATION = pytest.mark.parametrize("dtypes", COMBINATIONS, ids=str)
EVERY_KIND = pytest.mark.parametrize("dtypes", KINDS, ids=str)
EVERY_MASTER = pytest.mark.parametrize("dtypes", WITH_MASTERS, ids=str)


@dataclass
class AdamLists:
    """Lists that a step reads and writes; entries with the same index belong to one parameter."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]  # empty without amsgrad
    state_steps: list[Tensor]
    masters: list[Tensor]  # empty without masters

    def columns(self):
        """Return the lists, in the order in which the op takes them."""
        return [getattr(self, field.name) for field in fields(self)]

    def tensors(self):
        """Return the tensors of all lists."""
        return [tensor for column in self.columns() for tensor in column]

    def clone(self):
        """Return a copy that shares no memory with this."""
        return AdamLists(*([x.clone() for x in column] for column in self.columns()))

    def only(self, *indices):
        """Return the tensors with these indices, without copying them."""
        return AdamLists(*([column[i] for i in indices if column] for column in self.columns()))

    def stepped(self):
        """Return the tensors that a step updates: the masters if present, else the parameters."""
        if not self.masters:
            return self.params
        pairs = zip(self.params, self.masters, strict=True)
        return [join(p, x) if x.dtype == torch.int16 else x for p, x in pairs]


def concatenated(*parts):
    """Return the lists of all parts, one part after the other."""
    columns = zip(*(part.columns() for part in parts), strict=True)
    return AdamLists(*([x for column in of_all for x in column] for of_all in columns))


def adam_lists(shapes, device, dtypes=Dtypes(), *, amsgrad=False, maximize=False, steps=0, seed=0):
    """Return lists of heavy-tailed numbers, as they might be after `steps` steps.

    Parameter, gradient and mean of an element have the same sign (with `maximize`, the gradient has
    the opposite one). Parameters are so far from zero that the first few steps of 1e-3 do not
    change their sign. So no sum except the last one cancels, and all results can be exact to a few
    roundings of their own size.
    """
    lists = AdamLists([], [], [], [], [], [], [])
    wide = torch.float64 if dtypes.param == torch.float64 else torch.float32
    for i, shape in enumerate(shapes):
        value, grad, mean, square, largest = (
            heavy_tailed(shape, wide, device, seed=1000 * seed + 10 * i + k) for k in range(5)
        )
        sign = value.sign()
        value += 0.1 * sign
        lists.grads.append((grad.abs() * (-sign if maximize else sign)).to(dtypes.grad))
        lists.exp_avgs.append((mean.abs() * sign * (steps > 0)).to(dtypes.moment))
        lists.exp_avg_sqs.append((square.abs() * (steps > 0)).to(dtypes.moment))
        if amsgrad:
            lists.max_exp_avg_sqs.append((largest.abs() * (steps > 0)).to(dtypes.moment))
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


def renew_gradients(lists, seed):
    """Overwrite the gradients with new ones of the same signs."""
    for i, grad in enumerate(lists.grads):
        new = heavy_tailed(tuple(grad.shape), grad.dtype, grad.device, seed=1000 * seed + i)
        grad.copy_(new.abs() * grad.sign())


def with_masters(lists, dtypes):
    """Return a copy of float32 lists whose parameters became 16-bit parameters and masters."""
    copy = lists.clone()
    if dtypes.master == torch.float32:
        return replace(copy, params=[x.to(dtypes.param) for x in copy.params], masters=copy.params)
    params, masters = zip(*map(split, copy.params), strict=True)
    return replace(copy, params=list(params), masters=list(masters))


def split(x):
    """Split float32 numbers into the nearest bfloat16 (ties away from zero) and a remainder.

    As integers, the bits of x are those of the bfloat16 times 2¹⁶ plus the remainder. The bits of a
    NaN are cut in two instead. The upper half is made a quiet NaN, or it might be an infinity.
    """
    bits = x.view(torch.int32).long()
    upper = torch.where(x.isnan(), (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
    return wrapped(upper).view(torch.bfloat16), wrapped(bits)


def join(param, remainder):
    """Return the float32 numbers that were split."""
    upper = param.view(torch.int16).long() << 16
    bits = torch.where(param.isnan(), upper | (remainder.long() & 0xFFFF), upper + remainder.long())
    return (((bits + 2**31) % 2**32) - 2**31).int().view(torch.float32)


def wrapped(integers):
    """Return the lower 16 bits as signed integers."""
    return (((integers + 2**15) % 2**16) - 2**15).short()


@dataclass
class ExactStep:
    """One parameter before and after a step, and its state after the step, in float64."""

    before: Tensor
    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor


def exact_step(lists, lr=1e-3, *, grad_factor=1.0, **options):
    """Return the result of one step for each parameter of the lists, by the formulae above."""
    beta1, beta2, weight_decay, eps, amsgrad, maximize, decoupled = (OPTIONS | options).values()
    results = []
    for i, before in enumerate(x.to(torch.float64, copy=True) for x in lists.stepped()):
        grad = lists.grads[i].double() * grad_factor
        t = lists.state_steps[i].item() + 1
        g, p = (-grad if maximize else grad), before
        if decoupled:
            p = p - lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = beta1 * lists.exp_avgs[i].double() + (1 - beta1) * g
        v = beta2 * lists.exp_avg_sqs[i].double() + (1 - beta2) * g * g
        largest = torch.maximum(lists.max_exp_avg_sqs[i].double(), v) if amsgrad else v
        m_hat = m / (1 - beta1**t)
        v_hat = largest / (1 - beta2**t)
        p = p - lr * m_hat / (v_hat.sqrt() + eps)
        results.append(ExactStep(before, p, m, v, largest))
    return results


def take_exact_step(lists, lr, **options):
    """Replace the tensors of float64 lists by the results of one step of the formulae."""
    results = exact_step(lists, lr, **options)
    lists.params = [result.param for result in results]
    lists.exp_avgs = [result.exp_avg for result in results]
    lists.exp_avg_sqs = [result.exp_avg_sq for result in results]
    lists.state_steps = [count + 1 for count in lists.state_steps]


def assert_stored(actual, expected, error):
    """Check `actual` against exact numbers. Allow `error` for the arithmetic, and one rounding to
    the dtype: half an ulp, or half a step of its subnormal numbers."""
    info = torch.finfo(actual.dtype)
    half_a_bit = (info.eps * expected.abs()).clamp(min=info.smallest_normal * info.eps) / 2
    off = (actual.double() - expected).abs()
    assert (off <= half_a_bit + error).all(), f"{(off / (half_a_bit + error)).max().item():.3g} ×"


def assert_step(lists, exact):
    """Check that the lists contain the exact results of the step, except for roundings.

    These operations round by half an ulp each, which is relative to the result if nothing cancels.
    Each is counted as if it rounded the whole number that it is a part of:

        g: the factor, ·factor, λ, + λ·p
        m: the roundings of g, and 1−β₁, g − m, + m
        v: twice the roundings of g, and 1−β₂, ·g, β₂, ·v, +
        update: the roundings of m, half of those of v, and the size, ·m, √, the floor, +, /
        p: lr·λ, − lr·λ·p, − the update, and the roundings of the update

    The reference rounds in float64, which only matters for float64 results: these may have twice
    the error.
    """
    of_grad, of_mean = 4, 4 + 3
    of_square = 2 * of_grad + 5
    of_update = of_mean + of_square / 2 + 6
    stepped = lists.stepped()
    for i, step in enumerate(exact):
        unit = torch.finfo(stepped[i].dtype if stepped[i].itemsize > 2 else torch.float32).eps / 2
        if stepped[i].dtype == torch.float64:
            unit *= 2
        mean, square = step.exp_avg, step.exp_avg_sq
        assert_stored(lists.exp_avgs[i], mean, of_mean * unit * mean.abs())
        assert_stored(lists.exp_avg_sqs[i], square, of_square * unit * square)
        if lists.max_exp_avg_sqs:
            largest = step.max_exp_avg_sq
            assert_stored(lists.max_exp_avg_sqs[i], largest, of_square * unit * largest)
        size = torch.maximum(step.before.abs(), step.param.abs())
        update = (step.param - step.before).abs()
        assert_stored(stepped[i], step.param, unit * (3 * size + of_update * update))


def step(lists, lr=1e-3, **options):
    """Take a step of ampfuse with OPTIONS, which `options` override."""
    rate = lr if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float64)
    fused_adam(*lists.columns(), lr=rate, **OPTIONS | options)


def assert_takes_exact_step(lists, lr=1e-3, **options):
    """Take a step, and compare it with the step of the formulae from the same numbers."""
    exact = exact_step(lists, lr, **options)
    counts = [count.item() for count in lists.state_steps]

    step(lists, lr, **options)

    assert_step(lists, exact)
    assert [count.item() for count in lists.state_steps] == [count + 1 for count in counts]


def assert_same_lists(a, b):
    """Check that all tensors of two lists have the same bits."""
    assert all(map(same_bits, a.tensors(), b.tensors()))
    assert len(a.tensors()) == len(b.tensors())
