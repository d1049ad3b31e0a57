"""Parameters whose gradients are given step by step, for the tests of ampfuse.Adam and AdamW."""

from collections.abc import Callable, Iterable, Sequence

import ampfuse
import pytest
import torch
from reference import heavy_tailed, same_bits
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

PAIRS = [(ampfuse.Adam, torch.optim.Adam), (ampfuse.AdamW, torch.optim.AdamW)]
CLASSES = [ours for ours, _ in PAIRS]
BOTH = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
BOTH_AND_TORCHS = pytest.mark.parametrize(
    ("cls", "of_torch"), PAIRS, ids=[cls.__name__ for cls in CLASSES]
)
HALVES = [torch.float16, torch.bfloat16]

# The CPU's unit of work is 8192 elements; one parameter is longer, one has no element.
SHAPES = [(33, 5), (), (8193,), (0, 4), (2, 3)]


def parameters(
    device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Parameter]:
    """One of each shape, of magnitudes 1e-7 … 10: some that a step moves far, some hardly."""
    return [
        Parameter((heavy_tailed(shape, torch.float32, device, seed + i) / 1024).to(dtype))
        for i, shape in enumerate(SHAPES)
    ]


def copies(params: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Parameter]:
    """Parameters of their own with the same values, and without gradients."""
    return [Parameter(param.detach().to(dtype or param.dtype, copy=True)) for param in params]


def feed(params: Sequence[Tensor], step: int, scale: float = 1.0) -> None:
    """Set the gradients of a step: 1e-4 … 1e4, and bfloat16 numbers, which every dtype holds."""
    for i, param in enumerate(params):
        grad = heavy_tailed(tuple(param.shape), torch.bfloat16, param.device, 1000 * step + i)
        param.grad = (grad.double() * scale).to(param.dtype)


def train(optimizer: Optimizer, params: Sequence[Tensor], steps: Iterable[int]) -> None:
    """Take the steps with these numbers."""
    for step in steps:
        feed(params, step)
        optimizer.step()


def trained(
    make: Callable[[list[Parameter]], Optimizer], params: list[Parameter], steps: Iterable[int]
) -> Optimizer:
    """A new optimizer of the parameters, some steps later."""
    optimizer = make(params)
    train(optimizer, params, steps)
    return optimizer


def clones(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The values as they are now."""
    return [tensor.detach().clone() for tensor in tensors]


def state_values(optimizer: Optimizer) -> list[dict[str, Tensor]]:
    """Each parameter's state as it is now, {} where there is none."""
    return [
        {name: value.clone() for name, value in optimizer.state.get(param, {}).items()}
        for group in optimizer.param_groups
        for param in group["params"]
    ]


def assert_same_but_for_norms(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Every bit on a CPU. A GPU adds squares in an order that depends on how many elements a pack
    has, so norms differ in their last bits there, and what was clipped to them does."""
    for tensor, other in zip(tensors, others, strict=True):
        if tensor.is_cuda:
            torch.testing.assert_close(tensor, other.detach(), rtol=2e-6, atol=2e-6)
        else:
            assert_same_bits([tensor], [other])


def assert_same_bits(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Compare dtypes, shapes and every bit."""
    for tensor, other in zip(tensors, others, strict=True):
        assert same_bits(tensor.detach(), other.detach())


def assert_same_state(optimizer: Optimizer, states: Sequence[dict[str, Tensor]]) -> None:
    """Compare what the optimizer keeps with `state_values` of another, or of an earlier time."""
    for state, other in zip(state_values(optimizer), states, strict=True):
        assert state.keys() == other.keys()
        assert_same_bits(state.values(), [other[name] for name in state])


def assert_near(
    params: Sequence[Tensor], others: Sequence[Tensor], steps: int, lr: float = 1e-3
) -> None:
    """Compare two float32 runs of the same gradients that round differently.

    A step rounds the parameter about twice, each time by 2⁻²⁴ of it, and a distance of at most
    10·lr (an old √v is up to 1/√(1−β₂) smaller than a new gradient, of which m takes 1−β₁) about
    ten times.
    """
    unit = 2.0**-24 * steps
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(
            param.detach(), other.detach(), rtol=4 * unit, atol=100 * lr * unit
        )
