"""Writes the files of a checkpoint: each rank its tensors, and rank 0 the index."""

import json
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import inf, prod
from pathlib import Path
from typing import Any

from torch import Tensor

from ampfuse.checkpoint import _index, _tensor_file
from ampfuse.checkpoint._errors import CheckpointError, required
from ampfuse.checkpoint._folder import (
    RunLock,
    free_name,
    latest,
    put_in_place,
    remove_others,
    unfinished_folder,
)
from ampfuse.checkpoint._shards import Shard

# Tensors of a GPU are copied to the host a file at a time.
MOST_BYTES = 2**32
LONGEST_WAIT = 1800.0  # seconds for what another rank writes in the background
LONGEST_WAIT_AFTER_ERROR = 60.0  # seconds; the error may be that the other rank was killed
PAUSE = 0.05

Written = tuple[dict[str, Any], dict[str, Any]]
"""The entries of the index for files and for tensors."""


class Writing:
    """A checkpoint that rank 0 writes. Others cannot write to the run until it is closed."""

    def __init__(self, folder: Path, step: int) -> None:
        self._step = step
        if (folder / _index.NAME).exists():
            raise CheckpointError(f"{folder}: this is a checkpoint; pass the folder of the run")
        try:
            self._lock = RunLock(folder)
            try:
                self.path = free_name(folder, step)
                self.unfinished = unfinished_folder(self.path)
            except BaseException:
                self._lock.release()
                raise
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot write here: {error}") from error

    def hand_over(self) -> None:
        """Let a background thread finish and close it."""
        self._lock.hand_over()

    def finish(self, content: dict[str, Any], parts: Iterable[Written], keep: int | None) -> None:
        """Write the index of what all ranks have written, and remove old checkpoints."""
        with writing(self.path.parent, self._step):
            _index.write(self.unfinished, content | joined(parts))
            put_in_place(self.unfinished, self.path)
            remove_others(self.path, self._step, keep)
            newest = latest(self.path.parent)
        if newest != self.path:
            warnings.warn(
                f"save: {self.path.name} is not the latest checkpoint, which is {newest}; a new "
                "run needs a folder of its own",
                stacklevel=2,
            )

    def close(self) -> None:
        """Remove what is unfinished, and let others write."""
        if self.unfinished.exists():
            shutil.rmtree(self.unfinished, ignore_errors=True)
        self._lock.release()


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
        same = [one for one in pieces if region_of(one) == region_of(piece)]
        if any(one["hash"] != piece["hash"] for one in same):
            raise CheckpointError(
                f"save: {name} differs between ranks; all ranks must have the same model"
            )
        if not same:
            pieces.append(piece)


def region_of(piece: dict[str, Any]) -> tuple[Any, Any]:
    """Return the start and the shape of a piece."""
    return piece["start"], piece["shape"]


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


def begin_note(folder: Path, rank: int) -> Path:
    """Create the file of a note, so that it can be left even if the disk is full later."""
    beside = folder / f".rank-{rank}.new"
    beside.touch()
    return beside


def leave_note(beside: Path, written: Written | None, error: str | None = None) -> None:
    """Write for rank 0 what this rank has written in the background, or its error.

    Collective calls in a thread would mix with those of the training, so a file is used.
    """
    beside.write_text(json.dumps([written, error]))
    beside.rename(beside.with_suffix(""))


def leave_error(beside: Path, error: BaseException) -> None:
    """Let rank 0 know that this rank could not write its part in the background."""
    try:
        leave_note(beside, None, str(error) or repr(error))
    except OSError:
        with suppress(OSError):  # rank 0 has removed the folder, if this fails, too
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
