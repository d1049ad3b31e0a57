"""Files of tensors in the format of safetensors, with a hash for each tensor and for the header."""

import ctypes
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ampfuse.checkpoint._errors import CheckpointError, required

LENGTH = 8  # bytes at the beginning of a file, which hold the length of its header


def hash_of(data: Any) -> str:
    """Return the 128-bit XXH3 of bytes."""
    return str(required("xxhash").xxh3_128_hexdigest(data))


def hash_of_tensor(tensor: Tensor) -> str:
    """Return the hash of the bytes of a contiguous tensor on the CPU."""
    size = tensor.nbytes
    return hash_of((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b"")


def write(path: Path, tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, str]]:
    """Write a file to the disk.

    Return its size and the hash of its header, and the hashes of the tensors.
    """
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    required("safetensors.torch").save_file(on_cpu, path)
    hashes = {name: hash_of_tensor(tensor) for name, tensor in on_cpu.items()}
    flush(path)
    return {"bytes": path.stat().st_size, "header": hash_of(header_of(path))}, hashes


def header_of(path: Path) -> bytes:
    """Return the length and the header of a file."""
    with path.open("rb") as file:
        length = file.read(LENGTH)
        return length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))


def flush(path: Path) -> None:
    """Wait until the disk has the content of a file, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class TensorFile:
    """A file that is read. Each tensor is compared with its hash."""

    def __init__(self, path: Path, expected: dict[str, Any]) -> None:
        """Open a file that has this size and this hash of the header."""
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path}: this file is missing") from None
        if size != expected["bytes"]:
            raise CheckpointError(f"{path}: expected {expected['bytes']:,} bytes, got {size:,}")
        if hash_of(header_of(path)) != expected["header"]:
            raise CheckpointError(f"{path}: its header has changed since it was written")
        self._path = path
        self._file = required("safetensors").safe_open(path, framework="pt")

    def read(self, name: str, expected_hash: str) -> Tensor:
        """Return a tensor, which may be mapped from the file."""
        tensor: Tensor = self._file.get_tensor(name)
        if hash_of_tensor(tensor) != expected_hash:
            raise CheckpointError(
                f"{self._path}: {name}: the tensor has changed since it was written"
            )
        return tensor
