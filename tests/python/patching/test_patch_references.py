"""Names of torch that other modules imported before or while they were replaced."""

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
from torch.optim import AdamW
from torch.optim import AdamW as TorchAdamW

OPTIMIZERS = {"adamw": AdamW, "sgd": torch.optim.SGD}


class Settings:
    AdamW = AdamW
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


def test_names_imported_before_or_while_patched_are_torchs_again_afterwards(other, monkeypatch):
    functional, optim = torch.nn.functional, torch.optim
    torchs = optim.AdamW
    with ampfuse.patched():
        late = imported(monkeypatch, "late")
        assert late.AdamW is optim.AdamW is not torchs
        assert other.GradScaler is torch.amp.GradScaler
        assert other.AdamW is optim.AdamW is other.Settings.AdamW
        assert other.cross_entropy is functional.cross_entropy
        # A module that uses a name of its own may mean torch's class, so that name is kept.
        assert other.TorchAdamW is torchs is other.OPTIMIZERS["adamw"]
    for module in (other, late):
        assert module.AdamW is torchs is module.Settings.AdamW
    assert other.cross_entropy is functional.cross_entropy


def test_table_of_a_library_holds_replacements_only_if_patched_before_import(monkeypatch):
    """Import a library that has such a table, like timm's registry of optimizers."""
    library = "import torch\nTABLE = {'adamw': torch.optim.AdamW}\n"
    library += "def create(name, params): return TABLE[name](params)\n"
    made = {}
    for when in ("import first", "patch first"):
        if when == "patch first":
            ampfuse.patch()
        module = imported(monkeypatch, "library", library)
        ampfuse.patch()
        made[when] = module.create("adamw", [torch.nn.Parameter(torch.ones(1))])
        ampfuse.unpatch()
    assert not isinstance(made["import first"], ampfuse.AdamW)
    assert isinstance(made["patch first"], ampfuse.AdamW)


def test_unpatch_leaves_names_that_the_program_has_changed_since():
    original = torch.optim.AdamW
    ampfuse.patch("optimizers")
    torch.optim.AdamW = torch.optim.SGD
    ampfuse.unpatch()
    assert torch.optim.AdamW is torch.optim.SGD
    torch.optim.AdamW = original


class Refusing(types.ModuleType):
    """A module that refuses assignments to its attributes."""

    def __setattr__(self, name, value):
        raise AttributeError("read only")


def test_modules_that_refuse_assignment_keep_torchs_names(monkeypatch):
    refusing, torchs = Refusing("refusing"), torch.optim.AdamW
    vars(refusing)["AdamW"] = torchs
    monkeypatch.setitem(sys.modules, "refusing", refusing)
    with ampfuse.patched():
        assert torch.optim.AdamW is not torchs
        assert refusing.AdamW is torchs
    assert torch.optim.AdamW is torchs


def test_interrupted_entry_into_a_patched_block_leaves_nothing_replaced(monkeypatch):
    torchs = torch.optim.AdamW

    def interrupted(pairs):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("ampfuse.patching.parts.exchange", interrupted)
    with pytest.raises(KeyboardInterrupt), ampfuse.patched():
        pass
    assert torch.optim.AdamW is torchs
    assert all(part.blocks == 0 and not part.is_bound for part in ampfuse.patching.PARTS.values())


def test_class_made_from_a_replacement_has_the_module_that_made_it():
    ampfuse.patch()
    made = type("Made", (torch.optim.AdamW,), {})
    assert made.__module__ == __name__
    assert made.__mro__[1].__module__ == "torch.optim.adamw"


def test_symbolic_trace_of_the_patched_loss_keeps_torchs_keywords():
    def calls():
        graph = torch.fx.symbolic_trace(torch.nn.CrossEntropyLoss(reduction="sum")).graph
        return [(len(node.args), node.kwargs) for node in graph.nodes if node.kwargs]

    plain = calls()
    with ampfuse.patched():
        (ours,) = calls()
    assert ours[0] == plain[0][0]
    assert plain[0][1].items() <= ours[1].items()


def test_names_that_appear_between_patched_blocks_are_replaced(other, monkeypatch):
    torchs = torch.optim.AdamW
    other.GradScaler = other.Settings = None
    with ampfuse.patched():
        pass
    other.GradScaler = torch.amp.GradScaler
    other.Settings = type("Settings", (), {"AdamW": torchs, "__module__": "other_module"})
    with ampfuse.patched():
        assert other.GradScaler is torch.amp.GradScaler
        assert other.Settings.AdamW is torch.optim.AdamW is not torchs
    assert other.Settings.AdamW is torchs

    newer = imported(monkeypatch, "other_module")  # another module takes its name
    with ampfuse.patched():
        assert newer.AdamW is newer.Settings.AdamW is torch.optim.AdamW
        assert newer.AdamW is not newer.TorchAdamW


def test_patching_does_not_keep_modules_alive(monkeypatch):
    module = imported(monkeypatch, "short_lived", "from torch.optim import AdamW")
    ampfuse.patch()
    ampfuse.unpatch()
    with ampfuse.patched():
        pass
    monkeypatch.undo()
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


def test_dead_weak_proxies_in_modules_do_not_break_patching(monkeypatch):
    source = "import weakref\nproxy = weakref.proxy(set())"
    imported(monkeypatch, "of_proxies", source)
    with ampfuse.patched():
        ampfuse.patch()
