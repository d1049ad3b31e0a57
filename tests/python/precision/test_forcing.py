"""A program computes in the precision that is forced on it, and in the same places as by hand."""

from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
import torch
from ampfuse.patching import patched
from ampfuse.tools.precision.forcing import Forcing
from ampfuse.tools.precision.modules import Modules, drop_wrappers
from ampfuse.tools.precision.outcome import BFLOAT16, FLOAT16, FLOAT32, Outcome
from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def forced(precision):
    """Force a precision on the code of a block."""
    with ExitStack() as exits:
        outcome = Outcome(precision)
        forcing = Forcing(exits, outcome, lambda: modules.running)
        modules = Modules(exits, forcing.run)
        yield SimpleNamespace(forcing=forcing, outcome=outcome, modules=modules)


class Seen(nn.Module):
    """A linear layer that notes the dtype of its result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dtypes = []

    def forward(self, x):
        result = self.linear(x)
        self.dtypes.append(result.dtype)
        return result


@pytest.fixture
def x():
    return torch.randn(2, 4)


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, FLOAT16])
def test_autocast_lasts_from_the_model_until_backward(x, precision):
    model = Seen()
    patched_functions = torch.autocast.__init__, nn.Module.__call__
    with forced(precision) as made:
        assert torch.autocast.__init__ is not patched_functions[0]
        output = model(x)
        product = output @ output.t()  # a loss of functions is part of it
        assert product.dtype == (precision.dtype or torch.float32)
        made.forcing.end()
        assert (x @ x.t()).dtype == torch.float32
    assert model.dtypes == [precision.dtype or torch.float32]
    assert not torch.is_autocast_enabled("cpu")
    assert (torch.autocast.__init__, nn.Module.__call__) == patched_functions


def test_evaluation_is_in_the_same_precision_and_leaves_no_trace(x):
    model = Seen()
    with forced(BFLOAT16), torch.no_grad():
        model(x)
        assert (x @ x.t()).dtype == torch.float32
    assert model.dtypes == [torch.bfloat16]


@pytest.mark.parametrize("precision", [FLOAT32, BFLOAT16, FLOAT16])
def test_autocast_of_the_program_gets_the_dtype_and_keeps_its_extent(x, precision):
    model = Seen()
    with forced(precision) as made:
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        assert (x @ x.t()).dtype == torch.float32
    assert output.dtype == (precision.dtype or torch.float32)
    ((line, dtype),) = made.outcome.autocasts.items()
    assert line.startswith("test_forcing.py:")
    assert dtype == "torch.bfloat16"


def test_autocast_inside_of_a_module_keeps_its_extent_after_it(x):
    with forced(FLOAT16):

        class Inside(Seen):
            forward = torch.autocast("cpu", torch.bfloat16)(Seen.forward)

        model = Inside()
        model(x)
        assert (x @ x.t()).dtype == torch.float32
    assert model.dtypes == [torch.float16]


def test_part_that_disables_autocast_stays_in_float32(x):
    class Careful(Seen):
        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    model = nn.Sequential(Seen(), Careful())
    with forced(BFLOAT16) as made, torch.autocast("cpu", enabled=False):  # by an option
        model(x)
    assert model[0].dtypes == [torch.bfloat16]
    assert model[1].dtypes == [torch.float32]
    assert made.outcome.autocasts == {}  # the program does not use it
    assert "made, torch.autocast(" in made.outcome.places["off"]
    assert "`with torch.autocast(" in made.outcome.places["float32"]


def test_checkpointed_part_is_not_taken_for_autocast_of_the_program(x):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Checkpointed(Seen(), Seen())
    with forced(BFLOAT16) as made:
        loss = model(x).sum()
        made.forcing.end()
        loss.backward()
        assert (x @ x.t()).dtype == torch.float32
    assert model[0].dtypes == [torch.bfloat16] * 2  # in forward, and again in backward
    assert made.outcome.autocasts == {}


def test_module_that_is_kept_computes_in_float32_with_its_repetitions(x):
    layers = (nn.Sequential(OrderedDict(a=Seen(), b=Seen())) for _ in range(2))
    model = nn.Sequential(*layers)
    with forced(BFLOAT16.keeping("0.b")):
        model(x)
    for layer in model:
        assert layer.a.dtypes == [torch.bfloat16]
        assert layer.b.dtypes == [torch.float32]


def test_scaler_of_the_program_is_disabled_and_its_line_noted():
    for given in ({}, {"enabled": False}):
        with patched(), forced(FLOAT16) as made:
            scaler = torch.amp.GradScaler("cpu", **given)
        assert not scaler.is_enabled()
        # A scaler that the program disables itself needs no change.
        assert ("scaler" in made.outcome.places) == (given == {})


def test_copies_of_weights_that_have_changed_since_are_not_used(x):
    model = nn.Linear(4, 4)
    with forced(BFLOAT16) as made, torch.autocast("cpu", enabled=False):
        model(x)
        made.forcing.end()  # before an optimizer steps
        with torch.no_grad():
            model.weight.mul_(1000)
        expected = nn.functional.linear(
            x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16()
        )
        assert torch.equal(model(x), expected)


def test_module_without_parameters_does_not_begin_autocast(x):
    with forced(BFLOAT16):
        nn.Sequential(nn.Flatten(), nn.ReLU())(x)
        assert (x @ x.t()).dtype == torch.float32


def test_autocast_for_a_device_that_is_not_there_is_none_of_the_programs(x):
    model = Seen()
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    warned = pytest.warns(UserWarning, match="CUDA is not available")
    with forced(BFLOAT16) as made, warned, torch.autocast("cuda"):
        model(x)
    assert made.outcome.autocasts == {}
    assert made.outcome.places.keys() == {"off"}
    assert model.dtypes == [torch.bfloat16]


def test_parameters_have_different_names_and_none_is_left_out(x):
    layers = [nn.Linear(4, 4) for _ in range(3)]
    free = nn.Parameter(torch.ones(1))
    with forced(FLOAT32) as made:
        optimizer = torch.optim.SGD([free, *layers[0].parameters()])
        for layer in layers:
            layer(x)
    found = made.modules.parameters()
    assert {id(param) for param in found.values()} == {
        id(param) for param in (free, *(param for layer in layers for param in layer.parameters()))
    }
    assert set(found) == {
        *("weight", "weight (2)", "weight (3)", "bias", "bias (2)", "bias (3)", "parameter")
    }
    assert optimizer.param_groups[0]["params"][0] is free


def test_names_are_those_of_the_program_also_behind_wrappers(x):
    for name in ("layer.0", "module.layer.0", "_orig_mod.layer.0", "module._orig_mod.layer.0"):
        assert drop_wrappers(name) == "layer.0"
    names = []
    model = nn.Sequential(Seen(), nn.ReLU())
    with forced(FLOAT32) as made:
        made.modules.on_output = lambda name, inputs, output: names.append(name)
        torch.compile(model, backend="eager", fullgraph=False, disable=True)(x)
        model(x)
        assert set(made.modules.parameters()) == {"0.linear.weight", "0.linear.bias"}
    assert names[:4] == ["0.linear", "0", "1", "Sequential"]
