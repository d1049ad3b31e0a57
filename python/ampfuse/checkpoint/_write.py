"""Writes the files of a checkpoint."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ampfuse.checkpoint import _index, _tensor_file
from ampfuse.checkpoint._errors import CheckpointError, required
from ampfuse.checkpoint._folder import RunLock, free_name, new_folder, remove_others

# Tensors of a GPU are copied to the host a file at a time.
MOST_BYTES = 2**32


class Claim(NamedTuple):
    """The right to write a checkpoint."""

    path: Path
    """Its folder, once it is complete."""
    step: int
    lock: RunLock


def claim(folder: Path, step: int) -> Claim:
    """Lock a run, until `write` ends."""
    try:
        lock = RunLock(folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot write here: {error}") from error
    try:
        return Claim(free_name(folder, step), step, lock)
    except BaseException:
        lock.release()
        raise


def write(claimed: Claim, content: Any, tensors: dict[str, Tensor], keep: int | None) -> None:
    """Write a checkpoint, then remove old ones."""
    path, step, lock = claimed
    safetensors_error = required("safetensors").SafetensorError
    try:
        with new_folder(path) as unfinished:
            _index.write(unfinished, content | write_files(unfinished, tensors))
        remove_others(path, step, keep)
    except (OSError, safetensors_error) as error:
        raise CheckpointError(
            f"{path.parent}: the checkpoint of step {step} could not be written: {error}"
        ) from error
    finally:
        lock.release()


def write_files(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write tensors into files of some GiB, and return what the index says of files and tensors."""
    files, entries = {}, {}
    for number, names in enumerate(batches(tensors)):
        file = f"tensors-{number:05}.safetensors"
        files[file], hashes = _tensor_file.write(
            folder / file, {name: tensors[name] for name in names}
        )
        for name in names:
            entries[name] = {
                "dtype": str(tensors[name].dtype),
                "shape": list(tensors[name].shape),
                "file": file,
                "hash": hashes[name],
            }
    return {"files": files, "tensors": entries}


def batches(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of tensors in lists, each of at most 4 GiB or of one tensor."""
    result: list[list[str]] = []
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if not result or (size > MOST_BYTES and result[-1]):
            result.append([])
            size = tensor.nbytes
        result[-1].append(name)
    return result
