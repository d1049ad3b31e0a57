"""ampfuse.patch(): the replacements of torch's names, how long they last, and how they behave."""

import copy
import inspect
import pickle
import sys
import threading
from abc import ABC, abstractmethod

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS

NAMES = {
    "scaler": [
        (torch, "GradScaler"),
        (torch.amp, "GradScaler"),
        (torch.amp.grad_scaler, "GradScaler"),
        (torch.cuda.amp, "GradScaler"),
        (torch.cuda.amp.grad_scaler, "GradScaler"),
        (torch.cpu.amp, "GradScaler"),
        (torch.cpu.amp.grad_scaler, "GradScaler"),
    ],
    "optimizers": [
        (torch.optim, "Adam"),
        (torch.optim, "AdamW"),
        (sys.modules["torch.optim.adam"], "Adam"),
        (sys.modules["torch.optim.adamw"], "AdamW"),
    ],
    "cross_entropy": [(torch.nn.functional, "cross_entropy")],
    "clip_grad_norm": [
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.nn.utils.clip_grad, "clip_grad_norm_"),
    ],
}
ORIGINALS = {
    (module, name): getattr(module, name) for part in NAMES.values() for module, name in part
}


def replaced():
    """Return the replaced parts; check that all or no names of each part are replaced."""
    found = []
    for part, names in NAMES.items():
        changed = {getattr(module, name) is not ORIGINALS[module, name] for module, name in names}
        assert len(changed) == 1, part
        found += [part] * changed.pop()
    return found


@pytest.fixture(autouse=True)
def as_before():
    assert replaced() == []
    yield
    ampfuse.unpatch()
    assert replaced() == []


def parameter():
    return torch.nn.Parameter(torch.ones(3))


def test_all_parts_are_replaced_and_put_back():
    ampfuse.patch()
    assert replaced() == list(NAMES) == list(PARTS)
    ampfuse.unpatch()
    assert replaced() == []


def test_patch_and_unpatch_accept_chosen_parts():
    ampfuse.patch("scaler", "cross_entropy")
    assert replaced() == ["scaler", "cross_entropy"]
    ampfuse.patch(without=["scaler", "optimizers", "cross_entropy"])
    assert replaced() == ["scaler", "cross_entropy", "clip_grad_norm"]
    ampfuse.unpatch("scaler")
    assert replaced() == ["cross_entropy", "clip_grad_norm"]


@pytest.mark.parametrize("call", [ampfuse.patch, ampfuse.unpatch])
def test_unknown_parts_are_refused(call):
    with pytest.raises(ValueError, match=r"expected parts among scaler, .*got 'adamw'"):
        call("scaler", "adamw")
    with pytest.raises(ValueError, match="got 'loss'"), ampfuse.patched(without=["loss"]):
        pass
    with pytest.raises(TypeError, match="expected each part as one argument, got \\['scaler'\\]"):
        call(["scaler"])
    assert replaced() == []


def test_patching_or_unpatching_twice_has_the_effect_of_once():
    ampfuse.patch()
    first = torch.optim.AdamW
    ampfuse.patch()
    assert torch.optim.AdamW is first
    ampfuse.unpatch()
    assert replaced() == []
    ampfuse.unpatch()


def test_patched_blocks_may_nest_and_mix_with_patch_and_unpatch():
    with ampfuse.patched("scaler"):
        with ampfuse.patched():
            assert replaced() == list(NAMES)
            ampfuse.patch("optimizers")
            ampfuse.unpatch("scaler")  # the surrounding block still needs it
            assert replaced() == list(NAMES)
        assert replaced() == ["scaler", "optimizers"]
    assert replaced() == ["optimizers"]


def test_patched_block_that_raises_restores_all_names():
    with pytest.raises(KeyError), ampfuse.patched():
        raise KeyError
    assert replaced() == []


def test_patched_block_of_a_thread_outlives_the_block_of_another():
    entered, left = threading.Event(), threading.Event()
    seen = []

    def other():
        with ampfuse.patched():
            entered.set()
            left.wait(30)
            seen.append(replaced())

    thread = threading.Thread(target=other)
    with ampfuse.patched("cross_entropy"):
        thread.start()
        entered.wait(30)
        both = replaced()
    left.set()
    thread.join()
    assert both == list(NAMES)
    assert seen == [list(NAMES)]


def test_many_threads_may_enter_and_leave_patched_blocks():
    errors = []

    def come_and_go():
        try:
            for _ in range(5):
                with ampfuse.patched("optimizers"):
                    assert isinstance(torch.optim.AdamW([parameter()]), ampfuse.AdamW)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# --- classes -------------------------------------------------------------------------------------


def test_isinstance_holds_for_objects_made_before_and_while_patched():
    cls = torch.optim.AdamW
    before = cls([parameter()])
    scaler_before = torch.amp.GradScaler("cpu")
    with ampfuse.patched():
        now, scaler = torch.optim.AdamW([parameter()]), torch.amp.GradScaler("cpu")
        assert isinstance(before, torch.optim.AdamW)
        assert isinstance(scaler_before, torch.amp.GradScaler)
        assert isinstance(now, cls)
        assert isinstance(now, torch.optim.AdamW)
        assert isinstance(now, torch.optim.Optimizer)
        assert isinstance(scaler, torch.GradScaler)
        assert not isinstance(torch.optim.SGD([parameter()]), torch.optim.AdamW)
        assert not isinstance(now, torch.amp.GradScaler)
        assert issubclass(ampfuse.AdamW, torch.optim.AdamW)
        assert issubclass(torch.optim.AdamW, torch.optim.Optimizer)
        assert issubclass(torch.optim.AdamW, cls)
        assert inspect.isclass(torch.optim.AdamW)
    assert isinstance(now, torch.optim.AdamW)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert isinstance(ampfuse.Adam([parameter()]), torch.optim.Adam)


def test_type_of_a_patched_optimizer_is_not_the_class_it_was_made_by():
    with ampfuse.patched():
        optimizer = torch.optim.AdamW([parameter()])
        assert type(optimizer) is not torch.optim.AdamW
        assert type(optimizer) is not ORIGINALS[torch.optim, "AdamW"]
        assert isinstance(optimizer, torch.optim.AdamW)


def test_dict_keys_are_the_classes_bound_when_the_dict_was_made():
    cls = torch.optim.AdamW
    before = {torch.optim.AdamW: "before"}
    with ampfuse.patched():
        meanwhile = {torch.optim.AdamW: "meanwhile"}
        assert before[cls] == "before"
        assert torch.optim.AdamW not in before
        assert meanwhile[torch.optim.AdamW] == "meanwhile"
        assert cls not in meanwhile


@pytest.mark.filterwarnings("ignore:.*GradScaler.args.*deprecated")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_deprecated_scaler_names_make_ampfuse_scalers_and_warn_as_torch(device):
    home = getattr(torch, device).amp
    cls = home.GradScaler
    with ampfuse.patched():
        with pytest.warns(
            FutureWarning, match=rf"`torch.{device}.amp.GradScaler\(args...\)` is dep"
        ):
            scaler = home.GradScaler(2.0**4, enabled=device == "cpu" or torch.cuda.is_available())
        assert isinstance(scaler, ampfuse.GradScaler)
        assert isinstance(scaler, home.GradScaler)
        assert isinstance(scaler, cls)
        assert scaler.get_scale() == (2.0**4 if scaler.is_enabled() else 1.0)
        assert isinstance(copy.deepcopy(scaler), cls)
        again = pickle.loads(pickle.dumps(scaler))
        assert again.state_dict() == scaler.state_dict()


def test_class_derived_while_patched_derives_from_torchs_class():
    cls = torch.optim.AdamW
    with ampfuse.patched():

        class Mine(torch.optim.AdamW):
            """A derived class whose own subclasses take the class keyword `mark`."""

            def __init_subclass__(cls, mark=None):
                cls.mark = mark

            def __init__(self, params):
                super().__init__(params, lr=0.5)

        class Abstract(torch.optim.AdamW, ABC):
            @abstractmethod
            def name(self): ...

        class Derived(Mine, mark=3): ...

    assert Mine.__mro__[1] is cls
    assert Derived.mark == 3
    optimizer = Derived([parameter()])
    assert optimizer.defaults["lr"] == 0.5
    assert not isinstance(optimizer, ampfuse.AdamW)
    with pytest.raises(TypeError, match="abstract"):
        Abstract([parameter()])


def test_replacements_have_torchs_signatures_names_and_attributes():
    originals = {name: getattr(torch.optim, name) for name in ("Adam", "AdamW")}
    cross_entropy = torch.nn.functional.cross_entropy
    with ampfuse.patched():
        for name, original in originals.items():
            mine = getattr(torch.optim, name)
            assert inspect.signature(mine) == inspect.signature(original)
            assert (mine.__module__, mine.__qualname__) == (original.__module__, name)
            assert mine.__doc__ == original.__doc__
            assert mine.step is original.step
            assert pickle.loads(pickle.dumps(mine)) is mine
        mine = torch.nn.functional.cross_entropy
        assert inspect.signature(mine) == inspect.signature(cross_entropy)
        assert mine.__doc__ == cross_entropy.__doc__


def test_replacements_kept_after_their_block_act_as_torchs():
    with ampfuse.patched():
        adamw, scaler = torch.optim.AdamW, torch.amp.GradScaler
        loss, clip = torch.nn.functional.cross_entropy, torch.nn.utils.clip_grad_norm_
    assert type(adamw([parameter()])) is torch.optim.AdamW
    assert type(scaler("cpu")) is torch.amp.GradScaler
    uses = PARTS["cross_entropy"].usage.uses
    loss(torch.zeros(1, 2), torch.tensor([0]))
    assert PARTS["cross_entropy"].usage.uses == uses
    p = parameter()
    p.grad = torch.ones(3)
    assert clip([p], 1.0).item() == pytest.approx(3**0.5)


def test_single_part_may_be_left_out_by_its_name():
    with ampfuse.patched(without="scaler"):
        assert replaced() == ["optimizers", "cross_entropy", "clip_grad_norm"]


@pytest.mark.parametrize("kind", ["list", "generator", "tensor"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16,),
        (torch.float16,),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.complex64,),
        (),
    ],
    ids=str,
)
def test_patched_clip_grad_norm_returns_a_norm_of_torchs_dtype(device, dtypes, kind):
    def clipped():
        params = [torch.nn.Parameter(torch.ones(3, device=device, dtype=d)) for d in dtypes]
        for param in params:
            param.grad = torch.full_like(param, 3)
        given = {"list": params, "generator": iter(params), "tensor": (params or [None])[0]}[kind]
        return torch.nn.utils.clip_grad_norm_(given, 1.0)

    if kind == "tensor" and not dtypes:
        return
    expected = clipped()
    with ampfuse.patched():
        norm = clipped()
    assert norm.dtype == expected.dtype
    torch.testing.assert_close(norm, expected, rtol=2**-8, atol=0)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_patched_clip_grad_norm_has_torchs_dtype_in_compiled_programs(device, dtype):
    param = torch.nn.Parameter(torch.ones(3, device=device, dtype=dtype))
    param.grad = torch.ones_like(param)
    with ampfuse.patched():
        clip = torch.compile(
            lambda: torch.nn.utils.clip_grad_norm_([param], 1.0), backend="eager", fullgraph=True
        )
        norm = clip()
    assert norm.dtype == dtype
    assert norm.item() == pytest.approx(3**0.5, rel=2**-8)
