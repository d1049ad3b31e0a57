"""State files shared with C++ programs: read as plain data or refused, replaced only as a whole."""

import io
import os
import pickle
import random
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ampfuse
import pytest
import torch
from ampfuse.cpp_archive._file import read_archive, write_archive
from cpp_archives import edited, replaced, same_values, spoiled
from scaler_languages import LANGUAGES
from torch.nn import Parameter

CPP = LANGUAGES["C++"]
DTYPES = (torch.half, torch.bfloat16, torch.double, torch.int16, torch.bool, torch.complex64)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")


def save_cpp_scaler(file: Path) -> None:
    CPP.save(CPP.scaler(None, 64.0, min_scale=2.0, hysteresis=3), file)


def save_optimizer(file: Path) -> None:
    params = [Parameter(torch.ones(2, 3, dtype=torch.bfloat16)), Parameter(torch.ones(4))]
    groups = [{"params": params[:1], "amsgrad": True}, {"params": params[1:], "lr": 0.25}]
    optimizer = ampfuse.AdamW(groups)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    ampfuse.save_cpp_optimizer_state(optimizer.state_dict(), file)


STATES = pytest.mark.parametrize(
    ("save", "load"),
    [
        (save_cpp_scaler, ampfuse.load_cpp_scaler_state),
        (save_optimizer, ampfuse.load_cpp_optimizer_state),
    ],
    ids=["scaler", "optimizer"],
)


class ScalerWithCode(torch.nn.Module):
    """A module whose `__setstate__` TorchScript runs when it loads the module."""

    scale: float

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    @torch.jit.export
    def __getstate__(self) -> tuple[float, bool]:
        return self.scale, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[float, bool]) -> None:
        self.scale = 2.0
        self.training = state[1]


# --- reading ------------------------------------------------------------------------------------


def test_archive_with_code_is_refused(tmp_path):
    file = tmp_path / "scaler.pt"
    torch.jit.save(torch.jit.script(ScalerWithCode()), file)
    with pytest.raises(ValueError, match=r"scaler\.pt: .* contains code in .* and was not loaded"):
        ampfuse.load_cpp_scaler_state(file)


def test_values_read_equal_those_written_and_those_torchscript_reads(tmp_path):
    storage = torch.arange(12.0)
    content = {
        "numbers": (1, -1, 300, 2**40, 0.5, float("-inf")),
        "words": ("", "é"),
        "flags": (True, False),
        "lists": ([1, 2], [0.5], [True], ["a"]),
        "strided": storage.view(3, 4).t()[1:],
        "shares_its_storage": storage[5:7],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        **{f"tensor/{i}": torch.ones(3, dtype=dtype) for i, dtype in enumerate(DTYPES)},
    }
    write_archive(content, tmp_path / "values.pt")

    read = read_archive(tmp_path / "values.pt")

    by_torchscript = torch.jit.load(tmp_path / "values.pt")
    for name, value in content.items():
        assert same_values(read[name], value)
        assert same_values(read[name], getattr(by_torchscript, name))


@STATES
def test_damaged_file_gives_the_same_state_or_a_value_error(save, load, tmp_path):
    file, damaged = tmp_path / "state.pt", tmp_path / "damaged.pt"
    save(file)
    state = load(file)
    refused = 0
    for data in spoiled(file):
        damaged.write_bytes(data)
        try:
            assert same_values(load(damaged), state)
        except ValueError as error:
            assert str(error).startswith(f"{damaged}: expected an")  # noqa: PT017
            refused += 1
    assert refused > 200  # the other changes hit bytes without effect, such as dates and padding


def test_files_of_random_bytes_are_refused(tmp_path):
    file = tmp_path / "random.pt"
    numbers = random.Random(0)
    for start in (b"", b"PK\3\4", b"PK\5\6"):
        for size in (0, 1, 18, 22, 1000, 100_000):
            file.write_bytes(start + numbers.randbytes(size))
            with pytest.raises(ValueError, match=r"random\.pt: expected an archive of torch::save"):
                ampfuse.load_cpp_scaler_state(file)


@pytest.mark.parametrize(
    "save",
    [
        torch.save,
        lambda state, file: torch.save(state, file, _use_new_zipfile_serialization=False),
        lambda state, file: file.write_bytes(pickle.dumps(state)),
    ],
    ids=["torch.save", "torch.save of old", "pickle"],
)
def test_file_saved_by_python_is_refused_with_a_hint_at_torch_load(save, tmp_path):
    save(ampfuse.GradScaler("cpu").state_dict(), tmp_path / "scaler.pt")
    with pytest.raises(ValueError, match=r"scaler\.pt: .* in C\+\+, got .* torch\.load reads"):
        ampfuse.load_cpp_scaler_state(tmp_path / "scaler.pt")


def test_missing_file_raises_file_not_found_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="scaler"):
        ampfuse.load_cpp_scaler_state(tmp_path / "scaler.pt")


def test_archive_written_on_a_gpu_is_read_on_the_cpu(tmp_path):
    save_optimizer(tmp_path / "optimizer.pt")
    cuda = b"X\6\0\0\0cuda:0"
    of_cuda = edited(tmp_path / "optimizer.pt", "data.pkl", replaced(b"X\3\0\0\0cpu", cuda))

    state = ampfuse.load_cpp_optimizer_state(of_cuda)

    assert same_values(state, ampfuse.load_cpp_optimizer_state(tmp_path / "optimizer.pt"))


def test_big_endian_archive_is_refused(tmp_path):
    save_optimizer(tmp_path / "optimizer.pt")
    file = edited(tmp_path / "optimizer.pt", "byteorder", lambda _: b"big")
    with pytest.raises(ValueError, match="got one with big-endian numbers"):
        ampfuse.load_cpp_optimizer_state(file)


OFFSET_SIZE_STRIDE = b"K\0(K\7t(K\1t"  # pickled values for a tensor of seven elements
OUTSIDE = {
    "offset": b"K\1(K\7t(K\1t",
    "size": b"K\0(K\x08t(K\1t",
    "stride": b"K\0(K\7t(K\2t",
    "negative stride": b"K\6(K\7t(J\xff\xff\xff\xfft",
    "negative offset": b"J\xff\xff\xff\xff(K\7t(K\1t",
    "offset of 2**64 bytes": b"\x8a\x08\0\0\0\0\0\0\0\x40(K\7t(K\1t",
    "more than 2**63 elements": b"K\0(K\7\x8a\x08\0\0\0\0\0\0\0\x40t(K\1K\0t",
    "more sizes than strides": b"K\0(K\7K\1t(K\1t",
    "no stride": b"K\0(K\7t(Nt",
}


@pytest.mark.parametrize("view", OUTSIDE.values(), ids=OUTSIDE)
def test_tensor_that_does_not_fit_in_its_storage_is_refused(view, tmp_path):
    write_archive({"scale": torch.ones(7)}, tmp_path / "scaler.pt")
    file = edited(tmp_path / "scaler.pt", "data.pkl", replaced(OFFSET_SIZE_STRIDE, view))
    with pytest.raises(ValueError, match="expected an archive of torch::save"):
        ampfuse.load_cpp_scaler_state(file)


@pytest.mark.parametrize(
    "call",
    [b"cos\nsystem\n(X\1\0\0\0:tR.", b"ctorch\nTensor\n)\x81."],
    ids=["os.system", "torch.Tensor"],
)
def test_calls_and_objects_that_torchscript_never_writes_are_refused(call, tmp_path):
    write_archive({"scale": 1.0}, tmp_path / "scaler.pt")
    file = edited(tmp_path / "scaler.pt", "data.pkl", lambda _: b"\x80\2" + call)
    with pytest.raises(ValueError, match=r"got one with (a call|an object) of \w+ \w+"):
        ampfuse.load_cpp_scaler_state(file)


@pytest.mark.parametrize("content", [{}, {"param_groups": 1}, {"param_groups": torch.nn.Module()}])
def test_optimizer_file_without_valid_param_groups_is_refused(content, tmp_path):
    write_archive(content, tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=r"optimizer\.pt: expected an Adam or AdamW optimizer"):
        ampfuse.load_cpp_optimizer_state(tmp_path / "optimizer.pt")


# --- writing ------------------------------------------------------------------------------------


SAVES = pytest.mark.parametrize(
    "save",
    [
        lambda file: ampfuse.save_cpp_scaler_state(ampfuse.GradScaler("cpu").state_dict(), file),
        save_optimizer,
    ],
    ids=["scaler", "optimizer"],
)


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Make writes beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@SAVES
def test_save_to_a_full_device_raises_os_error(save):
    with pytest.raises(OSError, match="No space left on device"):
        save("/dev/full")


@SAVES
def test_failed_save_leaves_the_old_file_and_no_temporary_file(save, tmp_path):
    file = tmp_path / "state.pt"
    file.write_bytes(b"before")
    with files_end_at(1000), pytest.raises(OSError, match="File too large"):
        save(file)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_save_through_a_symbolic_link_keeps_the_link(tmp_path):
    link, target = tmp_path / "latest.pt", tmp_path / "folder" / "scaler.pt"
    target.parent.mkdir()
    link.symlink_to(target)
    for scale in (4.0, 2.0):
        ampfuse.save_cpp_scaler_state(ampfuse.GradScaler("cpu", scale).state_dict(), link)
        assert link.is_symlink()
        assert ampfuse.load_cpp_scaler_state(target)["scale"] == scale


def test_new_file_gets_umask_permissions_and_overwritten_file_keeps_its_own(tmp_path):
    file = tmp_path / "state.pt"
    before = os.umask(0o027)
    try:
        save_optimizer(file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o640
        file.chmod(0o604)
        save_optimizer(file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o604
    finally:
        os.umask(before)


def test_scaler_state_is_written_to_and_read_from_a_file_object(tmp_path):
    stream = io.BytesIO()
    ampfuse.save_cpp_scaler_state(ampfuse.GradScaler("cpu", 8.0).state_dict(), stream)
    stream.seek(0)
    assert ampfuse.load_cpp_scaler_state(stream)["scale"] == 8.0
