"""Comparison of values from C++ archives, and ways to corrupt such archives."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch

Edit = Callable[[bytes], bytes | None]


def same_values(a: Any, b: Any) -> bool:
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


def edited(file: Path, record: str, edit: Edit) -> Path:
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


def replaced(old: bytes, new: bytes) -> Edit:
    def edit(data: bytes) -> bytes:
        assert old in data
        return data.replace(old, new)

    return edit


def spoiled(file: Path) -> Iterator[bytes]:
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
