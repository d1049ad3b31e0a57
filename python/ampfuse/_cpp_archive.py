"""The files of C++ programs: what `torch::save(…, file)` writes, as trees of values.

Such a file is a TorchScript module without code, whose attributes are values and further modules.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
    """A module with these attributes."""
    with _torchscript():
        torch.jit.save(torch.jit.script(archive(content)), file)


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
