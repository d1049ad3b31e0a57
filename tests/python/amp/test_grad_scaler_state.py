"""States and copies of scalers: plain values, refused as a whole if any entry is invalid."""

import copy
import io
import pickle

import ampfuse
import pytest
import torch
from scaler_languages import EVERY_LANGUAGE, LANGUAGES, step_by
from torch.amp.grad_scaler import _refresh_per_optimizer_state
from torch.nn import Parameter

PYTHON, CPP = LANGUAGES["Python"], LANGUAGES["C++"]

SPOILED = {
    "scale": [-1.0, float("nan"), float("inf"), 1e300, None, "64"],
    "growth_factor": [0.5, None, "2"],
    "backoff_factor": [1.5, 0.0, None],
    "growth_interval": [0, 2.5, None],
    "_growth_tracker": [-1, 0.5, 2**40],
    "min_scale": [0.0, "1"],
    "max_scale": [4.0],  # less than min_scale
    "hysteresis": [0, 1.5],
    "hysteresis_refill": ["never", 3],
    "dynamic": ["yes"],
    "_hysteresis_tracker": [-1, 0.5],
    "_consecutive_skips": [-1],
    "_updates": [None, 2**63 - 1],
}


def step(language, scaler, device, gradient=1.0):
    param = Parameter(torch.ones(1, device=device))
    step_by(scaler, language.sgd([param], lr=0.5), gradient * param.sum())


def stepped(language, device, *gradients, init_scale=4.0, **options):
    """Return a scaler after steps with these gradients; without any, its tensors do not exist."""
    scaler = language.scaler(device, init_scale, **options)
    for gradient in gradients:
        step(language, scaler, device, gradient)
    return scaler


def used_scaler(language, device):
    options = {"growth_interval": 3, "hysteresis": 2, "min_scale": 8.0}
    return stepped(language, device, 1.0, 1.0, float("inf"), init_scale=64.0, **options)


@EVERY_LANGUAGE
@pytest.mark.parametrize("key", SPOILED)
def test_a_state_with_an_invalid_entry_is_refused_as_a_whole(language, device, key):
    scaler = used_scaler(language, device)
    before = scaler.state_dict()
    different = before | {"scale": 1024.0, "growth_interval": 9, "_updates": 77, "hysteresis": 3}
    for value in SPOILED[key]:
        with pytest.raises((ValueError, TypeError, RuntimeError, AssertionError)) as refused:
            scaler.load_state_dict(different | {key: value})
        assert key.replace("_", "") in str(refused.value).replace("_", "").replace(" ", "")
        assert scaler.state_dict() == before, value


@EVERY_LANGUAGE
def test_a_truncated_or_empty_state_is_refused_as_a_whole(language, device):
    scaler = used_scaler(language, device)
    before = scaler.state_dict()
    for key in ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"):
        truncated = before | {"growth_factor": 4.0, "scale": 1.0, "hysteresis": 5}
        del truncated[key]
        words = f"has no '{key}'|expected an entry .{key}"
        with pytest.raises((KeyError, ValueError), match=words):
            scaler.load_state_dict(truncated)
        assert scaler.state_dict() == before, key
    with pytest.raises(RuntimeError, match="source state dict is empty"):  # torch's error
        scaler.load_state_dict({})


@EVERY_LANGUAGE
def test_loading_a_state_of_torchs_scaler_keeps_our_entries(language, device):
    scaler = used_scaler(language, device)
    before = scaler.state_dict()
    scaler.load_state_dict(torch.amp.GradScaler("cpu", 2.0).state_dict())
    assert scaler.get_scale() == 2.0
    for key in ("hysteresis", "min_scale", "_updates", "_hysteresis_tracker"):
        assert scaler.state_dict()[key] == before[key]


def test_incomplete_pickles_are_refused(device):
    pickled = pickle.dumps(ampfuse.GradScaler(device.type))
    with pytest.raises((pickle.UnpicklingError, EOFError)):
        pickle.loads(pickled[: len(pickled) // 2])
    scaler = ampfuse.GradScaler.__new__(ampfuse.GradScaler)
    with pytest.raises(ValueError, match="expected a pickled scaler, got one without"):
        scaler.__setstate__({"_enabled": True, "_device": "cpu"})


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")
def test_cpp_loads_none_of_the_entries_of_an_invalid_archive(tmp_path):
    scaler = CPP.scaler()
    before = scaler.state_dict()
    (tmp_path / "garbage").write_bytes(b"garbage")
    truncated = torch.nn.Module()
    truncated.scale = 1.0
    torch.jit.save(torch.jit.script(truncated), tmp_path / "truncated")
    with pytest.raises(RuntimeError):
        scaler.load(str(tmp_path / "garbage"))
    with pytest.raises(ValueError, match='expected an entry "growth_factor", got none'):
        scaler.load(str(tmp_path / "truncated"))
    assert scaler.state_dict() == before


@EVERY_LANGUAGE
def test_saved_states_hold_plain_python_values_and_begin_with_torchs_entries(language, device):
    file = io.BytesIO()
    torch.save(used_scaler(language, device).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {type(value) for value in state.values()} <= {float, int, bool, str, type(None)}
    assert list(state)[:5] == list(torch.amp.GradScaler("cpu").state_dict())
    assert (state["hysteresis"], state["min_scale"], state["_hysteresis_tracker"]) == (2, 8.0, 1)


def settings(scaler):
    names = ("scale", "growth_factor", "backoff_factor", "growth_interval")
    return *(getattr(scaler, f"get_{name}")() for name in names), scaler._get_growth_tracker()


@pytest.mark.parametrize("steps", [0, 1])
def test_copied_pickled_or_loaded_scalers_continue_from_the_same_state(device, steps):
    options = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2, "hysteresis": 2}
    saved = stepped(PYTHON, device, *[1.0] * steps, init_scale=2.0, **options)
    others = [copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))]
    for steps_of_other in (0, 1):
        loading = stepped(PYTHON, device, *[1.0] * steps_of_other, growth_factor=8.0)
        loading.load_state_dict(saved.state_dict())
        others.append(loading)

    for other in others:
        assert other.state_dict() == saved.state_dict()
        assert settings(other) == settings(saved) == (2.0, 4.0, 0.25, 2, steps)
        assert other._init_growth_tracker == steps
        assert other._per_optimizer_states.default_factory is _refresh_per_optimizer_state
        for _ in range(2):  # one growth interval: the scale grows once, the tracker ends as before
            step(PYTHON, other, device)
        assert settings(other) == (8.0, 4.0, 0.25, 2, steps)


def test_copied_and_pickled_scalers_keep_the_history_and_the_last_step(device):
    scaler = stepped(PYTHON, device, 1.0, 2.0, 3.0, 4.0, float("inf"), history=3)
    others = [copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))]
    for other in others:
        assert other.was_skipped()
        assert len(other.history()) == 3
        assert other.history() == scaler.history()
    for one in (scaler, *others):
        step(PYTHON, one, device)
        assert len(one.history()) == 3
        assert one.history() == scaler.history()


def test_snapshot_can_be_restored_twice_and_says_nothing_of_a_disabled_scaler(device):
    scaler = stepped(PYTHON, device, 1.0, float("inf"), history=2)
    snapshot, before = scaler.snapshot(), scaler.state_dict()
    history, updates = scaler.history(), scaler._history.recorded_updates()
    for _ in range(2):
        step(PYTHON, scaler, device)
        assert not scaler.was_skipped()
        scaler.restore(snapshot)
        assert scaler.was_skipped()
        assert scaler.state_dict() == before
        assert (scaler.history(), scaler._history.recorded_updates()) == (history, updates)
    disabled = ampfuse.GradScaler(device.type, enabled=False)
    assert disabled.snapshot() is None
    disabled.restore(None)


def test_scaler_that_version_0_2_0_has_pickled_is_loaded(device):
    state = stepped(PYTHON, device, 1.0, hysteresis=2).__getstate__()
    state["_policy"], state["_allow_no_grads"] = state.pop("policy"), state.pop("allow_no_grads")
    scaler = ampfuse.GradScaler.__new__(ampfuse.GradScaler)
    scaler.__setstate__(state)
    assert scaler.policy.hysteresis == 2
