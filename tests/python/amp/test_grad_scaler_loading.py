"""Scalers of both languages refuse invalid states without a change, and save plain ones."""

import io
import pickle

import ampfuse
import pytest
import torch
from ampfuse.cpp_archive._file import write_archive
from scaler_languages import EVERY_LANGUAGE, LANGUAGES
from torch.nn import Parameter

CPP = LANGUAGES["C++"]

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


def used_scaler(language, device):
    """Return a scaler that has created its tensors."""
    param = Parameter(torch.ones(2, device=device))
    optimizer = language.sgd([param], lr=0.5)
    scaler = language.scaler(device, 64.0, growth_interval=3, hysteresis=2, min_scale=8.0)
    for grad in (1.0, 1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(grad * param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler


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
        assert scaler.state_dict() == before


@EVERY_LANGUAGE
@pytest.mark.parametrize(
    "key", ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
)
def test_a_truncated_state_is_refused_as_a_whole(language, device, key):
    scaler = used_scaler(language, device)
    before = scaler.state_dict()
    truncated = before | {"growth_factor": 4.0, "scale": 1.0, "hysteresis": 5}
    del truncated[key]

    with pytest.raises((KeyError, ValueError), match=f"has no '{key}'|expected an entry .{key}"):
        scaler.load_state_dict(truncated)

    assert scaler.state_dict() == before


@EVERY_LANGUAGE
def test_an_empty_state_raises_torchs_error(language, device):
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        language.scaler(device).load_state_dict({})


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


def test_cpp_loads_none_of_the_entries_of_an_invalid_archive(tmp_path):
    scaler = CPP.scaler()
    before = scaler.state_dict()
    (tmp_path / "garbage").write_bytes(b"garbage")
    write_archive({"scale": 1.0}, tmp_path / "truncated")

    with pytest.raises(RuntimeError):
        CPP.load(scaler, tmp_path / "garbage")
    with pytest.raises(ValueError, match='expected an entry "growth_factor", got none'):
        CPP.load(scaler, tmp_path / "truncated")

    assert scaler.state_dict() == before


def test_archive_functions_refuse_states_of_the_wrong_kind(tmp_path):
    optimizer = ampfuse.AdamW([torch.zeros(2)])
    file = tmp_path / "scaler.pt"
    for state in (optimizer.state_dict(), {}, {"scale": 1.0}):
        with pytest.raises(KeyError, match=r"has no .(scale|growth_factor).; it has"):
            ampfuse.save_cpp_scaler_state(state, file)
    assert not file.exists()

    ampfuse.save_cpp_optimizer_state(optimizer.state_dict(), file)
    with pytest.raises(ValueError, match="expected a scaler that was saved in C"):
        ampfuse.load_cpp_scaler_state(file)
    ampfuse.save_cpp_scaler_state(ampfuse.GradScaler("cpu").state_dict(), file)
    with pytest.raises(ValueError, match="expected an Adam or AdamW optimizer that was saved"):
        ampfuse.load_cpp_optimizer_state(file)


def test_saved_states_hold_plain_python_values(device):
    for language in LANGUAGES.values():
        file = io.BytesIO()
        torch.save(used_scaler(language, device).state_dict(), file)
        file.seek(0)
        kinds = {type(value) for value in torch.load(file, weights_only=True).values()}
        assert kinds <= {float, int, bool, str, type(None)}
