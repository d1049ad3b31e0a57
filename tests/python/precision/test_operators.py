"""The values of operators are examined, and the first operator that overflows is found."""

from contextlib import ExitStack

import pytest
import torch
from ampfuse.tools.precision.modules import Modules
from ampfuse.tools.precision.operators import OperatorWatch
from ampfuse.tools.precision.outcome import FLOAT32, Outcome
from ampfuse.tools.precision.samples import sample
from torch import nn


def run_plainly(original, module, name, args, kwargs, may_begin):
    return original(module, *args, **kwargs)


@pytest.fixture
def watch():
    with ExitStack() as exits:
        modules = Modules(exits, run_plainly)
        made = OperatorWatch(modules, Outcome(FLOAT32))
        made.is_paused = False
        with made:
            yield made


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 1000])
def test_sample_has_at_most_the_elements_that_are_wanted(count):
    assert 1 <= sample(torch.zeros(count), 64).numel() <= 64


def test_largest_gradient_is_found_in_backward_alone(watch):
    x = torch.ones(8, dtype=torch.bfloat16, requires_grad=True)
    loss = (x * -32.0).sum() / 8
    assert watch.outcome.largest_in_backward == 0.0
    loss.backward()
    assert watch.outcome.largest_in_backward == 4.0


def test_first_operator_that_overflows_is_named_with_its_module_and_line(watch):
    class Square(nn.Module):
        def forward(self, x):
            return (x * x).sum() + 1

    model = nn.Sequential(nn.Identity(), Square())
    model(torch.full((4,), 300.0, dtype=torch.float16))
    (found,) = watch.outcome.overflows
    assert (found.module, found.operator) == ("1", "mul")
    assert found.where.startswith("test_operators.py:")


def test_overflow_in_backward_is_left_to_the_scaler(watch):
    x = torch.full((2,), 0.01, dtype=torch.float16, requires_grad=True)
    (x * 300.0).backward(torch.full((2,), 300.0, dtype=torch.float16))
    assert x.grad.isinf().all()
    assert watch.outcome.overflows == []


RANDOM = {
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal_": lambda x: x.clone().normal_(),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("draw", RANDOM.values(), ids=list(RANDOM))
def test_random_numbers_are_the_same_in_all_precisions(watch, draw, dtype):
    x = torch.ones(1000)
    torch.manual_seed(3)
    expected = draw(x)
    after = torch.rand(1)
    torch.manual_seed(3)
    got = draw(x.to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=2**-7, atol=0)
    assert torch.rand(1) == after


def test_watch_changes_no_results_and_counts_nothing_while_paused(watch):
    watch.is_paused = True
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    results = []
    for is_paused in (True, False):
        watch.is_paused = is_paused
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().sum()
        loss.backward()
        results.append([loss.detach(), *(param.grad for param in model.parameters())])
        assert bool(watch.outcome.largest_in_backward) != is_paused
    assert all(map(torch.equal, *results))
