"""References to torch's classes and functions in modules that were imported before patching."""

import gc
import sys
import types
import weakref

import ampfuse
import pytest
import torch

OTHER = """
import torch
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.functional import cross_entropy as torchs_loss
from torch.optim import AdamW

OPTIMIZERS = {"adamw": AdamW, "sgd": torch.optim.SGD}
"""


@pytest.fixture(autouse=True)
def as_before():
    yield
    ampfuse.unpatch()


def imported(monkeypatch, name, source=OTHER):
    """Return a module with this source, as if the program had imported it."""
    module = types.ModuleType(name)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture
def other(monkeypatch):
    return imported(monkeypatch, "other_module")


def params():
    return [torch.nn.Parameter(torch.ones(1))]


def test_functions_imported_before_or_while_patched_are_torchs_again_afterwards(other, monkeypatch):
    functional = torch.nn.functional
    torchs = functional.cross_entropy
    with ampfuse.patched():
        late = imported(monkeypatch, "late")
        assert other.cross_entropy is late.cross_entropy is functional.cross_entropy is not torchs
        # A module that uses a name of its own may mean torch's function, so that name is kept.
        assert other.torchs_loss is torchs
    assert other.cross_entropy is late.cross_entropy is functional.cross_entropy is torchs


def test_classes_are_patched_wherever_a_program_refers_to_them(other):
    with ampfuse.patched():
        assert isinstance(other.AdamW(params()), ampfuse.AdamW)
        assert isinstance(other.OPTIMIZERS["adamw"](params()), ampfuse.AdamW)
        assert isinstance(other.GradScaler("cpu"), ampfuse.GradScaler)
    assert type(other.AdamW(params())) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("owner", "name"), [(torch.nn.functional, "cross_entropy"), (torch.optim.AdamW, "__init__")]
)
def test_unpatch_leaves_names_that_the_program_has_changed_since(owner, name):
    original = getattr(owner, name)
    ampfuse.patch()
    setattr(owner, name, print)
    ampfuse.unpatch()
    assert getattr(owner, name) is print
    setattr(owner, name, original)


def test_symbolic_trace_of_the_patched_loss_keeps_torchs_keywords():
    def calls():
        graph = torch.fx.symbolic_trace(torch.nn.CrossEntropyLoss(reduction="sum")).graph
        return [(len(node.args), node.kwargs) for node in graph.nodes if node.kwargs]

    plain = calls()
    with ampfuse.patched():
        (ours,) = calls()
    assert ours[0] == plain[0][0]
    assert plain[0][1].items() <= ours[1].items()


def test_patching_does_not_keep_modules_alive(monkeypatch):
    module = imported(monkeypatch, "short_lived")
    ampfuse.patch()
    ampfuse.unpatch()
    with ampfuse.patched():
        pass
    monkeypatch.undo()
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None
