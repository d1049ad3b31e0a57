"""State files shared with C++ programs: read as plain data or refused, replaced only as a whole."""

import io
import os
import pickle
import random
import resource
import stat
from contextlib import contextmanager
from zipfile import ZipFile

import ampfuse
import pytest
import torch
from ampfuse.cpp_archive._file import read_archive, write_archive
from scaler_languages import LANGUAGES
from torch.nn import Parameter

DTYPES = (torch.half, torch.bfloat16, torch.double, torch.int16, torch.bool, torch.complex64)

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated")


def save_cpp_scaler(file):
    cpp = LANGUAGES["C++"]
    cpp.save(cpp.scaler(None, 64.0, min_scale=2.0, hysteresis=3), file)


def save_scaler(file, scale=8.0):
    ampfuse.save_cpp_scaler_state(ampfuse.GradScaler("cpu", scale).state_dict(), file)


def save_optimizer(file):
    params = [Parameter(torch.ones(2, 3, dtype=torch.bfloat16)), Parameter(torch.ones(4))]
    groups = [{"params": params[:1], "amsgrad": True}, {"params": params[1:], "lr": 0.25}]
    optimizer = ampfuse.AdamW(groups)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    ampfuse.save_cpp_optimizer_state(optimizer.state_dict(), file)


def same_values(a, b):
    """Return True if two trees of values agree, including types, dtypes, devices and strides."""
    if isinstance(a, dict):
        return (
            isinstance(b, dict) and a.keys() == b.keys() and all(same_values(a[k], b[k]) for k in a)
        )
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same_values, a, b))
    if isinstance(a, torch.Tensor):
        layout = (a.dtype, a.device, a.shape, a.stride())
        return layout == (b.dtype, b.device, b.shape, b.stride()) and torch.equal(a, b)
    return type(a) is type(b) and a == b


def edited(file, record, edit):
    """Copy an archive and edit one record, or omit it if `edit` returns None."""
    copy = file.with_name(f"edited_{file.name}")
    with ZipFile(file) as archive, ZipFile(copy, "w") as out:
        for name in archive.namelist():
            data = archive.read(name)
            if name.partition("/")[2] == record:
                data = edit(data)
            if data is not None:
                out.writestr(name, data)
    return copy


def replaced(old, new):
    def edit(data):
        assert old in data
        return data.replace(old, new)

    return edit


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


def spoiled(file):
    """Yield many corrupted copies: truncated, with one byte changed, and without one record."""
    data = file.read_bytes()
    yield from (data[: len(data) * i // 100] for i in range(100))
    numbers = random.Random(0)
    for _ in range(300):
        changed = bytearray(data)
        changed[numbers.randrange(len(data))] ^= numbers.randrange(1, 256)
        yield bytes(changed)
    for name in ZipFile(file).namelist():
        yield edited(file, name.partition("/")[2], lambda _: None).read_bytes()


@pytest.mark.parametrize(
    ("save", "load"),
    [
        (save_cpp_scaler, ampfuse.load_cpp_scaler_state),
        (save_optimizer, ampfuse.load_cpp_optimizer_state),
    ],
)
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
# For each kind of harmful file: a record, its change, and the end of the error message.
HARMFUL = {
    "call": ("data.pkl", lambda _: b"\x80\2cos\nsystem\n(X\1\0\0\0:tR.", "a call of os system"),
    "object": ("data.pkl", lambda _: b"\x80\2ctorch\nTensor\n)\x81.", "an object of torch Tensor"),
    "big-endian": ("byteorder", lambda _: b"big", "one with big-endian numbers"),
    **{
        name: ("data.pkl", replaced(OFFSET_SIZE_STRIDE, view), "") for name, view in OUTSIDE.items()
    },
}


@pytest.mark.parametrize(("record", "edit", "words"), HARMFUL.values(), ids=HARMFUL)
def test_what_torchscript_never_writes_is_refused(record, edit, words, tmp_path):
    """TorchScript writes no calls, and no tensors that do not fit in their storage."""
    write_archive({"scale": torch.ones(7)}, tmp_path / "scaler.pt")
    file = edited(tmp_path / "scaler.pt", record, edit)
    with pytest.raises(ValueError, match=f"expected an archive of torch::save .*{words}"):
        ampfuse.load_cpp_scaler_state(file)


class ScalerWithCode(torch.nn.Module):
    """A module whose `__setstate__` TorchScript runs when it loads the module."""

    scale: float

    def __init__(self):
        super().__init__()
        self.scale = 1.0

    @torch.jit.export
    def __getstate__(self) -> tuple[float, bool]:
        return self.scale, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[float, bool]) -> None:
        self.scale = 2.0
        self.training = state[1]


def test_archive_with_code_is_refused(tmp_path):
    file = tmp_path / "scaler.pt"
    torch.jit.save(torch.jit.script(ScalerWithCode()), file)
    with pytest.raises(ValueError, match=r"scaler\.pt: .* contains code in .* and was not loaded"):
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


@pytest.mark.parametrize("content", [{}, {"param_groups": 1}, {"param_groups": torch.nn.Module()}])
def test_optimizer_file_without_valid_param_groups_is_refused(content, tmp_path):
    write_archive(content, tmp_path / "optimizer.pt")
    with pytest.raises(ValueError, match=r"optimizer\.pt: expected an Adam or AdamW optimizer"):
        ampfuse.load_cpp_optimizer_state(tmp_path / "optimizer.pt")


def test_archive_written_on_a_gpu_is_read_on_the_cpu(tmp_path):
    save_optimizer(tmp_path / "optimizer.pt")
    cuda = b"X\6\0\0\0cuda:0"
    of_cuda = edited(tmp_path / "optimizer.pt", "data.pkl", replaced(b"X\3\0\0\0cpu", cuda))
    state = ampfuse.load_cpp_optimizer_state(of_cuda)
    assert same_values(state, ampfuse.load_cpp_optimizer_state(tmp_path / "optimizer.pt"))


# --- writing ------------------------------------------------------------------------------------


@contextmanager
def files_end_at(size):
    """Make writes beyond `size` bytes of a file fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("save", [save_scaler, save_optimizer])
def test_failed_save_leaves_the_old_file_and_no_temporary_file(save, tmp_path):
    with pytest.raises(OSError, match="No space left on device"):
        save("/dev/full")
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
        save_scaler(link, scale)
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


def test_scaler_state_is_written_to_and_read_from_a_file_object():
    stream = io.BytesIO()
    save_scaler(stream)
    stream.seek(0)
    assert ampfuse.load_cpp_scaler_state(stream)["scale"] == 8.0
