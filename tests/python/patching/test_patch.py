"""ampfuse.patch(): the replacements of torch's names, how long they last, and how they behave."""

import copy
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS

NAMES = {
    "scaler": [(torch.amp.GradScaler, "__init__")],
    "optimizers": [(torch.optim.Adam, "__init__"), (torch.optim.AdamW, "__init__")],
    "cross_entropy": [(torch.nn.functional, "cross_entropy")],
    "clip_grad_norm": [
        (torch.nn.utils, "clip_grad_norm_"),
        (torch.nn.utils.clip_grad, "clip_grad_norm_"),
    ],
}
ORIGINALS = {(owner, name): getattr(owner, name) for part in NAMES.values() for owner, name in part}


def replaced():
    """Return the replaced parts; check that all or no names of each part are replaced."""
    found = []
    for part, names in NAMES.items():
        changed = {getattr(owner, name) is not ORIGINALS[owner, name] for owner, name in names}
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


def test_all_parts_are_replaced_once_and_put_back():
    ampfuse.patch()
    first = torch.nn.functional.cross_entropy
    assert replaced() == list(NAMES) == list(PARTS)
    ampfuse.patch()  # has no further effect
    assert torch.nn.functional.cross_entropy is first
    ampfuse.unpatch()
    assert replaced() == []
    ampfuse.unpatch()


def test_patch_and_unpatch_accept_chosen_parts():
    ampfuse.patch("scaler", "cross_entropy")
    assert replaced() == ["scaler", "cross_entropy"]
    ampfuse.patch(without=["scaler", "optimizers", "cross_entropy"])
    assert replaced() == ["scaler", "cross_entropy", "clip_grad_norm"]
    ampfuse.unpatch("scaler")
    assert replaced() == ["cross_entropy", "clip_grad_norm"]
    with ampfuse.patched(without="scaler"):  # a single part needs no list
        assert replaced() == ["optimizers", "cross_entropy", "clip_grad_norm"]


@pytest.mark.parametrize("call", [ampfuse.patch, ampfuse.unpatch])
def test_unknown_parts_are_refused(call):
    with pytest.raises(ValueError, match=r"expected parts among scaler, .*got 'adamw'"):
        call("scaler", "adamw")
    with pytest.raises(ValueError, match="got 'loss'"), ampfuse.patched(without=["loss"]):
        pass
    with pytest.raises(TypeError, match="expected each part as one argument, got \\['scaler'\\]"):
        call(["scaler"])
    assert replaced() == []


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
    block = ampfuse.patched()
    with ThreadPoolExecutor(1) as thread:
        with ampfuse.patched("cross_entropy"):
            thread.submit(block.__enter__).result()
            assert replaced() == list(NAMES)
        assert replaced() == list(NAMES)
        thread.submit(block.__exit__, None, None, None).result()


def test_many_threads_may_enter_and_leave_patched_blocks():
    def come_and_go(_):
        with ampfuse.patched("optimizers"):
            return isinstance(torch.optim.AdamW([parameter()]), ampfuse.AdamW)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(come_and_go, range(20)))


# --- classes -------------------------------------------------------------------------------------


def test_isinstance_holds_for_objects_made_before_and_while_patched():
    before, scaler_before = torch.optim.AdamW([parameter()]), torch.amp.GradScaler("cpu")
    with ampfuse.patched():
        now, scaler = torch.optim.AdamW([parameter()]), torch.amp.GradScaler("cpu")
        assert isinstance(now, ampfuse.AdamW)
        assert isinstance(scaler, ampfuse.GradScaler)
        assert not isinstance(torch.optim.SGD([parameter()]), torch.optim.AdamW)
    for optimizer in (before, now, ampfuse.AdamW([parameter()])):
        assert isinstance(optimizer, torch.optim.AdamW)
    for one in (scaler_before, scaler):
        assert isinstance(one, torch.GradScaler)


def test_objects_made_before_can_be_pickled_while_patched():
    before = torch.optim.AdamW([parameter()])
    with ampfuse.patched():
        again = pickle.loads(pickle.dumps([before, torch.optim.AdamW]))
    assert type(again[0]) is again[1] is torch.optim.AdamW


@pytest.mark.filterwarnings("ignore:.*GradScaler.args.*deprecated")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_deprecated_scaler_names_make_ampfuse_scalers_and_warn_as_torch(device):
    home = getattr(torch, device).amp
    cls = home.GradScaler
    is_enabled = device == "cpu" or torch.cuda.is_available()
    words = rf"`torch.{device}.amp.GradScaler\(args...\)` is dep"
    with ampfuse.patched():
        with pytest.warns(FutureWarning, match=words):
            scaler = home.GradScaler(2.0**4, 3.0, enabled=is_enabled)
        assert isinstance(scaler, ampfuse.GradScaler)
        assert isinstance(scaler, home.GradScaler)
        assert isinstance(scaler, cls)
        again = pickle.loads(pickle.dumps(scaler))
        for one in (scaler, copy.deepcopy(scaler), again):
            assert isinstance(one, cls)
            assert one.state_dict() == scaler.state_dict()
            assert one.get_scale() == (2.0**4 if is_enabled else 1.0)
            assert not is_enabled or one.get_growth_factor() == 3.0


def test_class_derived_from_torchs_class_stays_torchs():
    with ampfuse.patched():

        class Mine(torch.optim.AdamW):
            def __init__(self, params):
                super().__init__(params, lr=0.5)

        class MyScaler(torch.amp.GradScaler): ...

        optimizer, scaler = Mine([parameter()]), MyScaler("cpu")
    assert optimizer.defaults["lr"] == 0.5
    assert type(optimizer) is Mine
    assert not isinstance(scaler, ampfuse.GradScaler)


def test_replacements_have_torchs_signatures_and_texts():
    def described():
        functions = (torch.nn.functional.cross_entropy, torch.nn.utils.clip_grad_norm_)
        classes = (torch.optim.Adam, torch.optim.AdamW, torch.amp.GradScaler)
        return [(inspect.signature(one), one.__doc__) for one in (*functions, *classes)]

    torchs = described()
    with ampfuse.patched():
        assert described() == torchs


def test_replacements_kept_after_their_block_act_as_torchs():
    with ampfuse.patched():
        init = torch.optim.AdamW.__init__
        loss, clip = torch.nn.functional.cross_entropy, torch.nn.utils.clip_grad_norm_
    optimizer = object.__new__(torch.optim.AdamW)
    init(optimizer, [parameter()])
    assert type(optimizer) is torch.optim.AdamW
    uses = PARTS["cross_entropy"].usage.uses
    loss(torch.zeros(1, 2), torch.tensor([0]))
    assert PARTS["cross_entropy"].usage.uses == uses
    p = parameter()
    p.grad = torch.ones(3)
    assert clip([p], 1.0).item() == pytest.approx(3**0.5)
