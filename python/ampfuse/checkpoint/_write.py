"""Writes the files of a checkpoint: each rank its tensors, and rank 0 the index."""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import inf, prod
from pathlib import Path
from typing import Any

from torch import Tensor

from ampfuse.checkpoint import _tensor_file
from ampfuse.checkpoint._errors import CheckpointError, required
from ampfuse.checkpoint._shards import Shard

# Tensors of a GPU are copied to the host a file at a time.
MOST_BYTES = 2**32
LONGEST_WAIT = 1800.0  # seconds for what another rank writes in the background
LONGEST_WAIT_AFTER_ERROR = 60.0  # seconds; the error may be that the other rank was killed
PAUSE = 0.05

Written = tuple[dict[str, Any], dict[str, Any]]
"""The entries of the index for files and for tensors."""


@contextmanager
def writing(folder: Path, step: int) -> Iterator[None]:
    """Raise errors of the system as CheckpointError."""
    safetensors_error = required("safetensors").SafetensorError
    try:
        yield
    except (OSError, safetensors_error) as error:
        raise CheckpointError(
            f"{folder}: the checkpoint of step {step} could not be written: {error}"
        ) from error


def write_files(
    folder: Path, tensors: dict[str, Tensor], shards: dict[str, Shard], rank: int
) -> Written:
    """Write tensors into files of some GiB."""
    files, entries = {}, {}
    kind = f"rank-{rank:05}" if rank else "tensors"
    for number, names in enumerate(batches(tensors)):
        file = f"{kind}-{number:05}.safetensors"
        files[file], hashes = _tensor_file.write(
            folder / file, {name: tensors[name] for name in names}
        )
        for name in names:
            entry: dict[str, Any] = {"dtype": str(tensors[name].dtype)}
            stored = {"file": file, "hash": hashes[name]}
            if shard := shards.get(name):
                region = {"start": list(shard.region.start), "shape": list(shard.region.shape)}
                entry |= {"shape": list(shard.shape), "pieces": [stored | region]}
            else:
                entry |= {"shape": list(tensors[name].shape), **stored}
            entries[name] = entry
    return files, entries


def joined(parts: Iterable[Written]) -> dict[str, Any]:
    """Return what the index says of the files and tensors of all ranks."""
    all_files: dict[str, Any] = {}
    all_entries: dict[str, Any] = {}
    for files, entries in parts:
        all_files |= files
        for name, entry in entries.items():
            if name in all_entries:
                add_pieces(all_entries[name]["pieces"], entry["pieces"], name)
            else:
                all_entries[name] = entry
    for name, entry in all_entries.items():
        if "pieces" in entry:
            size = sum(prod(piece["shape"]) for piece in entry["pieces"])
            if size != prod(entry["shape"]):
                raise CheckpointError(f"save: the shards of {name} are not those of one tensor")
    return {"files": all_files, "tensors": all_entries}


def add_pieces(pieces: list[dict[str, Any]], more: list[dict[str, Any]], name: str) -> None:
    """Add pieces of a tensor. The same one may come from several meshes, as of DDP's replicas."""
    for piece in more:
        region = piece["start"], piece["shape"]
        same = [one for one in pieces if (one["start"], one["shape"]) == region]
        if any(one["hash"] != piece["hash"] for one in same):
            raise CheckpointError(
                f"save: {name} differs between ranks; all ranks must have the same model"
            )
        if not same:
            pieces.append(piece)


def batches(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Return the names of tensors in lists, each of at most 4 GiB or of one tensor."""
    result: list[list[str]] = []
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if not result or size > MOST_BYTES:
            result.append([])
            size = tensor.nbytes
        result[-1].append(name)
    return result


def leave_note(folder: Path, rank: int, write: Callable[[], Written]) -> None:
    """Write what this rank has, in the background, and leave a note for rank 0: that, or an error.

    Collective calls in a thread would mix with those of the training, so a file is used. It is
    created first, so that it can be left even if the disk is full later.
    """
    beside = folder / f".rank-{rank}.new"
    beside.touch()
    note: list[Any] = [None, "it was interrupted"]
    try:
        note = [write(), None]
    except Exception as error:
        note[1] = str(error) or repr(error)
        raise
    finally:
        try:
            beside.write_text(json.dumps(note))
        finally:
            beside.rename(beside.with_suffix(""))


def has_ended_by_error() -> bool:
    """Return True if an error has ended the program, which now waits for its threads."""
    return not threading.main_thread().is_alive() and hasattr(sys, "last_value")


def note_of(folder: Path, rank: int) -> Written:
    """Wait for what another rank has written in the background."""
    note = folder / f".rank-{rank}"
    start, ended = time.monotonic(), inf
    while not note.exists():
        now = time.monotonic()
        if has_ended_by_error():
            ended = min(ended, now)
        if now - start > LONGEST_WAIT or now - ended > LONGEST_WAIT_AFTER_ERROR:
            raise CheckpointError(
                f"{folder}: rank {rank} has not written its part in {now - start:.0f} seconds"
            )
        time.sleep(PAUSE)
    try:
        written, error = json.loads(note.read_text())
    except ValueError:
        written, error = None, "failed without a message"
    note.unlink()
    if written is None:
        raise CheckpointError(f"rank {rank}: {error}")
    return written[0], written[1]
