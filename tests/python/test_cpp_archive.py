"""Files of C++ programs: written as a whole or not at all."""

import io
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ampfuse
import pytest
import torch
from torch.nn import Parameter


def save_optimizer(file: Path) -> None:
    params = [Parameter(torch.ones(2, 3, dtype=torch.bfloat16)), Parameter(torch.ones(4))]
    groups = [{"params": params[:1], "amsgrad": True}, {"params": params[1:], "lr": 0.25}]
    optimizer = ampfuse.AdamW(groups)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    ampfuse.save_cpp_optimizer_state(optimizer.state_dict(), file)


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
    """Fail writes that would make a file larger than this, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@SAVES
def test_a_full_device_is_an_os_error(save):
    with pytest.raises(OSError, match="No space left on device"):
        save("/dev/full")


@SAVES
def test_a_failed_save_leaves_the_old_file_and_nothing_else(save, tmp_path):
    file = tmp_path / "state.pt"
    file.write_bytes(b"before")
    with files_end_at(1000), pytest.raises(OSError, match="File too large"):
        save(file)
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_symbolic_link_stays_one(tmp_path):
    link, target = tmp_path / "latest.pt", tmp_path / "folder" / "scaler.pt"
    target.parent.mkdir()
    link.symlink_to(target)
    for scale in (4.0, 2.0):
        ampfuse.save_cpp_scaler_state(ampfuse.GradScaler("cpu", scale).state_dict(), link)
        assert link.is_symlink()
        assert ampfuse.load_cpp_scaler_state(target)["scale"] == scale


def test_permissions_are_those_of_an_ordinary_file(tmp_path):
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


def test_file_objects_are_written_and_read(tmp_path):
    stream = io.BytesIO()
    ampfuse.save_cpp_scaler_state(ampfuse.GradScaler("cpu", 8.0).state_dict(), stream)
    stream.seek(0)
    assert ampfuse.load_cpp_scaler_state(stream)["scale"] == 8.0
