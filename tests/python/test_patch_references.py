"""Names of torch's that other modules had imported before they were replaced."""

import gc
import importlib.util
import sys
import types
import weakref

import ampfuse
import pytest
import torch

OTHER = """
from functools import partial

import torch
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim import AdamW as TorchAdamW

OPTIMIZERS = {"adamw": AdamW, "sgd": torch.optim.SGD}
LOSSES = [cross_entropy]
HANDLERS = {cross_entropy: print}
FIXED = (AdamW,)
later = partial(AdamW, lr=1.0)


class Settings:
    AdamW = AdamW
    optimizer = AdamW
    loss = staticmethod(cross_entropy)
    all = [AdamW]

    def make(self, cls=AdamW): ...


def closed_over():
    cls = AdamW
    return lambda: cls


closure = closed_over()


def with_defaults(params, cls=AdamW, *, loss=cross_entropy): ...
"""


@pytest.fixture(autouse=True)
def as_before():
    yield
    ampfuse.unpatch()


@pytest.fixture
def other(tmp_path):
    file = tmp_path / "other_module.py"
    file.write_text(OTHER)
    spec = importlib.util.spec_from_file_location("other_module", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["other_module"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["other_module"]


def test_names_that_were_imported_before_mean_ours(other):
    functional, optim = torch.nn.functional, torch.optim
    torchs = optim.AdamW
    with ampfuse.patched():
        assert other.GradScaler is torch.amp.GradScaler
        assert other.AdamW is optim.AdamW is other.Settings.AdamW
        assert other.cross_entropy is functional.cross_entropy
        # Whoever has another name for it may mean torch's.
        assert other.TorchAdamW is torchs is other.OPTIMIZERS["adamw"]
    assert other.AdamW is torchs is other.Settings.AdamW
    assert other.cross_entropy is functional.cross_entropy


def test_names_that_are_imported_meanwhile_are_put_back(other):
    torchs = torch.optim.AdamW
    with ampfuse.patched():
        other.AdamW = torch.optim.AdamW
    assert other.AdamW is torchs


def test_references_that_cannot_be_changed_are_logged(other, caplog):
    ampfuse.patch("optimizers", "cross_entropy")
    told = [record.getMessage() for record in caplog.records if "other_module" in record.message]
    where = {message.split(" is torch.")[0] for message in told}
    assert where == {
        "other_module.TorchAdamW",
        "other_module.OPTIMIZERS['adamw']",
        "other_module.LOSSES[0]",
        "a key of other_module.HANDLERS",
        "other_module.Settings.optimizer",
        "other_module.Settings.loss",
        "other_module.Settings.all[0]",
        "other_module.FIXED[0]",
        "other_module.later.func",
        "a default argument of other_module.Settings.make",
        "a default argument of other_module.with_defaults",
        "the default loss of other_module.with_defaults",
        "the closure of other_module.closure",
    }
    assert all("which is not replaced there" in message for message in told)


def test_tables_that_a_library_makes_at_its_import_follow_a_patch_that_came_before(monkeypatch):
    """As the registry of optimizers in timm does."""
    library = "import torch\nTABLE = {'adamw': torch.optim.AdamW}\n"
    library += "def create(name, params): return TABLE[name](params)\n"
    made = {}
    for when in ("import first", "patch first"):
        if when == "patch first":
            ampfuse.patch()
        module = types.ModuleType("library")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(library, vars(module))
        ampfuse.patch()
        made[when] = module.create("adamw", [torch.nn.Parameter(torch.ones(1))])
        ampfuse.unpatch()
    assert not isinstance(made["import first"], ampfuse.AdamW)
    assert isinstance(made["patch first"], ampfuse.AdamW)


def test_names_that_somebody_else_has_changed_since_are_left_alone():
    original = torch.optim.AdamW
    ampfuse.patch("optimizers")
    torch.optim.AdamW = torch.optim.SGD
    ampfuse.unpatch()
    assert torch.optim.AdamW is torch.optim.SGD
    torch.optim.AdamW = original


class Refusing(type(sys)):
    """A module that cannot be written to."""

    def __setattr__(self, name, value):
        raise AttributeError("read only")


@pytest.fixture
def refusing():
    module = Refusing("refusing")
    vars(module)["AdamW"] = torch.optim.AdamW
    sys.modules["refusing"] = module
    yield module
    del sys.modules["refusing"]


def test_modules_that_refuse_are_told_and_keep_nobody_else(refusing, caplog):
    torchs = torch.optim.AdamW
    with ampfuse.patched():
        assert torch.optim.AdamW is not torchs
        assert refusing.AdamW is torchs
    assert torch.optim.AdamW is torchs
    ampfuse.patch()
    told = [r.getMessage() for r in caplog.records]
    assert any("refusing.AdamW is torch.optim.adamw.AdamW still" in line for line in told)


def test_a_block_that_does_not_begin_leaves_nothing(monkeypatch):
    torchs = torch.optim.AdamW

    def interrupted(pairs):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr("ampfuse.patching._parts.exchange", interrupted)
    with pytest.raises(KeyboardInterrupt), ampfuse.patched():
        pass
    assert torch.optim.AdamW is torchs
    assert all(part.blocks == 0 and not part.is_bound for part in ampfuse.patching.PARTS.values())


def test_a_programs_data_is_not_gone_through(other, caplog):
    other.DATA = [torch.optim.AdamW] * 100_000
    other.FEW = [torch.optim.AdamW]
    ampfuse.patch()
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "other_module.FEW[0]" in told
    assert "other_module.DATA" not in told


def test_classes_that_are_made_of_a_stand_in_are_of_the_module_that_made_them():
    ampfuse.patch()
    made = type("Made", (torch.optim.AdamW,), {})
    assert made.__module__ == __name__
    assert made.__mro__[1].__module__ == "torch.optim.adamw"


def test_traced_losses_name_their_options_as_torchs_do():
    def calls():
        graph = torch.fx.symbolic_trace(torch.nn.CrossEntropyLoss(reduction="sum")).graph
        return [(len(node.args), node.kwargs) for node in graph.nodes if node.kwargs]

    plain = calls()
    with ampfuse.patched():
        (ours,) = calls()
    assert ours[0] == plain[0][0]
    assert plain[0][1].items() <= ours[1].items()


def test_dictionaries_may_change_while_they_are_gone_through(monkeypatch):
    """As the registries of finalizers do, when garbage is collected."""
    module = types.ModuleType("of_finalizers")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    registry = module.registry = {number: number for number in range(2000)}
    fresh = iter(range(2000, 10**6))

    def collected(phase, _):
        registry[next(fresh)] = phase

    thresholds = gc.get_threshold()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        with ampfuse.patched("optimizers"):
            pass
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collected)
    assert len(registry) > 2000


def test_names_that_appear_between_blocks_are_exchanged(other):
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


def test_names_in_a_module_that_took_the_place_of_another_are_exchanged(other, monkeypatch):
    with ampfuse.patched():
        pass
    newer = types.ModuleType("other_module")
    exec(OTHER, vars(newer))
    monkeypatch.setitem(sys.modules, "other_module", newer)
    with ampfuse.patched():
        assert newer.AdamW is newer.Settings.AdamW is torch.optim.AdamW
        assert newer.AdamW is not newer.TorchAdamW


def test_modules_are_not_kept_alive(monkeypatch):
    module = types.ModuleType("short_lived")
    module.AdamW = torch.optim.AdamW
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ampfuse.patch()
    ampfuse.unpatch()
    with ampfuse.patched():
        pass
    monkeypatch.undo()
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


def test_proxies_whose_object_is_gone_are_not_asked_anything(monkeypatch):
    module = types.ModuleType("of_proxies")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    module.proxy = weakref.proxy(set())
    with ampfuse.patched():
        ampfuse.patch()


def python_calls(run):
    """How many Python functions and generators are entered; it does not depend on the machine."""
    entered = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: entered.append(event == "call"))
    try:
        run()
    finally:
        sys.setprofile(before)
    return sum(entered)


def a_block():
    with ampfuse.patched():
        pass


def test_a_block_opens_no_functions_and_containers_of_modules(monkeypatch):
    module = types.ModuleType("with_many_names")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    without = python_calls(a_block)
    exec("".join(f"def f{i}(x=0): ...\nl{i} = [{i}]\n" for i in range(1000)), vars(module))
    assert module.f0.__module__ == module.__name__
    assert python_calls(a_block) - without < 100


def test_patching_what_is_patched_looks_at_no_modules():
    ampfuse.patch()
    assert python_calls(ampfuse.patch) < 100
