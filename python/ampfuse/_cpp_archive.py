"""The files of C++ programs: what `torch::save(…, file)` writes, as trees of values.

Such a file is a TorchScript module without code, whose attributes are values and further modules.
"""

import os
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from typing import IO, Any

import torch
from torch import Tensor
from torch.nn import Module

File = str | PathLike[str] | IO[bytes]


def read_archive(file: File) -> Any:
    """The module, its tensors on the CPU."""
    with _torchscript():
        return torch.jit.load(file, map_location="cpu")  # type: ignore[no-untyped-call]


def write_archive(content: dict[str, Any], file: File) -> None:
    """Write a module with these attributes. A failure leaves an older file as it was."""
    with _torchscript():
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
                with open(path, "r+b"):  # an error where the file is write-protected
                    shutil.copymode(path, beside)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(beside)
        raise


def archive(content: dict[str, Any]) -> Module:
    """Part of one."""
    module = Module()
    for name, value in content.items():
        if isinstance(value, Tensor):
            module.register_buffer(name, value.detach().cpu())
        else:
            setattr(module, name, value)
    return module


@contextmanager
def _torchscript() -> Iterator[None]:
    """Deprecated in Python, but what torch's C++ archives are made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
