"""Reads and writes the files of `torch::save(…, file)` in C++, as trees of values.

Such a file is a TorchScript module without code, whose attributes are values and further modules.
It is a zip archive: `data.pkl` has the values, `data/<key>` the bytes of a tensor's storage, and
`code/` the declarations of the modules' classes. TorchScript is used here to write such files, but
not to read them.
"""

import os
import pickle
import re
import secrets
import shutil
import sys
import warnings
from contextlib import suppress
from functools import cache
from io import BytesIO
from os import PathLike
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor, UntypedStorage

from ampfuse.cpp_archive._values import Module, UnexpectedError, read_values

File = str | PathLike[str] | IO[bytes]

_MOST_CODE = 2**26  # limit in bytes of one class's declaration; unlike data it may be compressed


def read_archive(file: File) -> Module:
    """Read a module, with its tensors on the CPU. Nothing in the file is run or compiled."""
    if isinstance(file, str | PathLike):
        with open(file, "rb") as stream:
            return _read(stream, file)
    return _read(BytesIO(file.read()), file)


def _read(stream: IO[bytes], file: File) -> Module:
    expected = f"{file}: expected an archive of torch::save in C++"
    try:
        is_pickle = stream.read(1) == pickle.PROTO
        stream.seek(0)
        if is_pickle:
            raise UnexpectedError("a Python pickle; torch.load reads Python's files")
        with ZipFile(stream) as archive:
            return _Records(archive).module()
    except UnexpectedError as error:
        raise ValueError(f"{expected}, got {error}") from None
    except Exception as error:  # zipfile raises many types for a damaged file
        kind = type(error).__name__
        raise ValueError(f"{expected}, got a damaged or different file: {kind}: {error}") from error


class _Records:
    """The members of the zip archive, by their names in its only folder."""

    def __init__(self, archive: ZipFile) -> None:
        self._archive = archive
        self._members = {info.filename.partition("/")[2]: info for info in archive.infolist()}

    def module(self) -> Module:
        self._check_layout()
        self._check_no_code()
        module = read_values(self._read("data.pkl"), cache(self._storage))
        if not isinstance(module, Module):
            raise UnexpectedError(f"one that holds a {type(module).__name__} instead of a module")
        return module

    def _check_layout(self) -> None:
        if "data.pkl" not in self._members:
            raise UnexpectedError("an archive of an unknown layout, without data.pkl")
        if "constants.pkl" not in self._members:
            raise UnexpectedError("one of torch.save in Python; torch.load reads Python's files")
        order = self._read("byteorder").decode() if "byteorder" in self._members else "little"
        if order != sys.byteorder:
            raise UnexpectedError(
                f"one with {order}-endian numbers on a {sys.byteorder}-endian machine"
            )

    def _check_no_code(self) -> None:
        for name, info in self._members.items():
            if not (name.startswith("code/") and name.endswith(".py")):
                continue
            if info.file_size > _MOST_CODE:
                raise UnexpectedError(f"{info.file_size} bytes of declarations in {name}")
            if re.search(rb"^[^\S\n]*def\b", self._archive.read(info), re.MULTILINE):
                raise UnexpectedError(f"one that contains code in {name} and was not loaded")

    def _read(self, name: str) -> bytes:
        if self._members[name].compress_type != ZIP_STORED:
            raise UnexpectedError(f"one with a compressed record {name}")
        return self._archive.read(self._members[name])

    def _storage(self, key: str) -> UntypedStorage:
        data = self._read("data/" + key)
        return UntypedStorage.from_buffer(data, dtype=torch.uint8)


def write_archive(content: dict[str, Any], file: File) -> None:
    """Write a module with these attributes. If it fails, a file at the path stays the same."""
    with warnings.catch_warnings():  # TorchScript, the format of C++ archives, is deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        data = torch.jit.script(archive(content)).save_to_buffer()  # type: ignore[no-untyped-call]
    if not isinstance(file, str | PathLike):
        file.write(data)
    elif os.path.exists(file) and not os.path.isfile(file):  # a pipe or a device
        with open(file, "wb") as out:
            out.write(data)
    else:
        _replace(os.path.realpath(file), data)


def _replace(path: str, data: bytes) -> None:
    beside = f"{path}.{secrets.token_hex(8)}.tmp"
    try:
        with open(beside, "xb") as out:
            if os.path.exists(path):
                with open(path, "r+b"):  # raises if the file is write-protected
                    shutil.copymode(path, beside)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def archive(content: dict[str, Any]) -> torch.nn.Module:
    """Return a module with these attributes, for `write_archive` or as an attribute of another."""
    module = torch.nn.Module()
    for name, value in content.items():
        if isinstance(value, Tensor):
            module.register_buffer(name, value.detach().cpu())
        else:
            setattr(module, name, value)
    return module
