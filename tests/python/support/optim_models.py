"""Parameters with given gradients for each step, for the tests of ampfuse.Adam and AdamW."""

from contextlib import contextmanager

import ampfuse
import pytest
import torch
from reference import heavy_tailed, same_bits
from torch.nn import Parameter

PAIRS = [(ampfuse.Adam, torch.optim.Adam), (ampfuse.AdamW, torch.optim.AdamW)]
CLASSES = [ours for ours, _ in PAIRS]
BOTH_AND_TORCHS = pytest.mark.parametrize(
    ("cls", "of_torch"), PAIRS, ids=[cls.__name__ for cls in CLASSES]
)
DTYPES_16_BIT = [torch.float16, torch.bfloat16]

# A model's dtype and an optimizer's options for each way to keep state.
KINDS = {
    "float32": (torch.float32, {}),
    "amsgrad": (torch.float32, {"amsgrad": True, "maximize": True}),
    "fp16": (torch.float16, {"write_back_grads": True}),
    "bf16": (torch.bfloat16, {}),
    "remainders": (torch.bfloat16, {"master_weights": "remainder"}),
    "no masters": (torch.bfloat16, {"master_weights": False, "amsgrad": True}),
    "bf16 moments": (torch.bfloat16, {"state_dtype": torch.bfloat16, "amsgrad": True}),
    "8-bit moments": (torch.bfloat16, {"state_dtype": "8bit", "master_weights": "remainder"}),
    "stochastic": (torch.float16, {"state_dtype": "8bit", "master_weights": "stochastic"}),
    "averages": (torch.bfloat16, {"ema": 0.9}),
}
EVERY_KIND = pytest.mark.parametrize(("dtype", "options"), KINDS.values(), ids=KINDS)
# The dtype and `master_weights` of models with masters.
FORMS = [(torch.float16, True), (torch.bfloat16, True), (torch.bfloat16, "remainder")]

# The CPU's unit of work is 8192 elements; one parameter is longer, one is empty.
SHAPES = [(33, 5), (), (8193,), (0, 4), (2, 3)]


def parameters(device, dtype=torch.float32, seed=0):
    """Return one parameter of each shape, of magnitudes 1e-7 … 10.

    A step changes small parameters a lot, and large ones hardly.
    """
    return [
        Parameter((heavy_tailed(shape, torch.float32, device, seed + i) / 1024).to(dtype))
        for i, shape in enumerate(SHAPES)
    ]


def copies(params, dtype=None):
    """Return new parameters with the same values and without gradients."""
    return [Parameter(param.detach().to(dtype or param.dtype, copy=True)) for param in params]


def feed(params, step, scale=1.0):
    """Set the gradients of a step: bfloat16 numbers of 1e-4 … 1e4, which every dtype can hold."""
    for i, param in enumerate(params):
        grad = heavy_tailed(tuple(param.shape), torch.bfloat16, param.device, 1000 * step + i)
        param.grad = (grad.double() * scale).to(param.dtype)


def train(optimizer, params, steps):
    """Take the steps with these numbers, each with its own gradients."""
    for step in steps:
        feed(params, step)
        optimizer.step()


@contextmanager
def default_dtype(dtype):
    """Make new tensors have this dtype by default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def clipped_adamw(params):
    return ampfuse.AdamW(params, max_grad_norm=1.0)


def trained(make, params, steps, **options):
    """Return a new optimizer of the parameters after it has taken the steps."""
    optimizer = make(params, **options)
    train(optimizer, params, steps)
    return optimizer


def clones(tensors):
    """Return copies of the current values."""
    return [tensor.detach().clone() for tensor in tensors]


def overwrite(params, values):
    """Copy values into parameters, as `load_state_dict` of a model does."""
    with torch.no_grad():
        for param, value in zip(params, values, strict=True):
            param.copy_(value)


def state_values(optimizer):
    """Return a copy of each parameter's state, or {} for a parameter without state."""
    return [
        {name: value.clone() for name, value in optimizer.state.get(param, {}).items()}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def assert_same_but_for_norms(tensors, others):
    """Compare every bit on a CPU, and allow small differences on a GPU.

    A GPU adds squares in an order that depends on the number of elements per pack, so norms, and
    numbers that were clipped by them, differ in their last bits.
    """
    for tensor, other in zip(tensors, others, strict=True):
        if tensor.is_cuda:
            torch.testing.assert_close(tensor, other.detach(), rtol=2e-6, atol=2e-6)
        else:
            assert_same_bits([tensor], [other])


def assert_same_bits(tensors, others):
    """Compare dtypes, shapes and every bit."""
    for tensor, other in zip(tensors, others, strict=True):
        assert same_bits(tensor.detach(), other.detach())


def assert_same_state(optimizer, states):
    """Compare the optimizer's state with `state_values`, taken earlier or of another optimizer."""
    for state, other in zip(state_values(optimizer), states, strict=True):
        assert state.keys() == other.keys()
        assert_same_bits(state.values(), [other[name] for name in state])


def assert_near(params, others, steps, lr=1e-3):
    """Compare two float32 runs of the same gradients that round differently.

    A step rounds the parameter about twice, each time by 2⁻²⁴ of its size. It also rounds the
    update, of at most 10·lr, about ten times (an old √v is up to 1/√(1−β₂) times smaller than a new
    gradient, and m takes 1−β₁ of that gradient).
    """
    unit = 2.0**-24 * steps
    for param, other in zip(params, others, strict=True):
        param, other = param.detach(), other.detach()
        torch.testing.assert_close(param, other, rtol=4 * unit, atol=100 * lr * unit)


def random_param(device, dtype=torch.bfloat16, size=300):
    """Return a parameter of normally distributed numbers."""
    torch.manual_seed(0)
    return Parameter(torch.randn(size).to(device, dtype))


def still(*params, **options):
    """Return an optimizer that has trained the parameters; lr is 0 then, so later steps keep them.

    Masters have bits that the parameters lack.
    """
    optimizer = ampfuse.AdamW(params, lr=0.01, weight_decay=0, **options)
    train(optimizer, params, range(3))
    optimizer.param_groups[0]["lr"] = 0.0
    return optimizer
