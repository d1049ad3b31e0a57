"""`load` and `verify`: read a checkpoint, and compare all that is read with its hashes."""

import os
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ampfuse._random import set_random_states
from ampfuse.checkpoint import _index
from ampfuse.checkpoint._errors import CheckpointError, required
from ampfuse.checkpoint._folder import found
from ampfuse.checkpoint._parts import check_arguments, is_model, load_state, mistakes, shardings
from ampfuse.checkpoint._ranks import get_from_rank_0, pick_for_this_rank, run_on_all_ranks
from ampfuse.checkpoint._shards import Region, assembled, shard_of
from ampfuse.checkpoint._tensor_file import TensorFile
from ampfuse.checkpoint._tree import decoded, dtype_of, put_in_order, tensors_of
from ampfuse.gradients.shards import sharded_like

MOST_MISTAKES = 5  # in a message
OF_TRAINING = ("param_groups", "get_last_lr", "get_scale")  # what only trains has one of these


class Loaded(NamedTuple):
    """The result of `load`."""

    path: Path
    """The folder of the checkpoint."""
    step: int
    values: Any
    """What `save` got as `values`."""


class Reader:
    """Reads the tensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        """Read the index, and check the sizes and headers of all files."""
        self.content = _index.read(folder)
        safetensors_error = required("safetensors").SafetensorError
        try:
            self._files = {
                name: TensorFile(folder / name, expected)
                for name, expected in self.content["files"].items()
            }
        except (OSError, safetensors_error) as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def names(self) -> set[str]:
        """Return the names of the objects in the checkpoint."""
        return set(self.content["parts"]) - {"rng", "values"}

    def verify(self, name: str, like: Tensor | None = None) -> None:
        """Compare a tensor with its hashes; with a DTensor `like`, only what this rank needs."""
        for _ in self._pieces(name, self._region(name, like)):
            pass

    def tensor(
        self, name: str, order: list[int] | None, like: Tensor | None, *, mapped: bool
    ) -> Tensor:
        """Return a stored tensor, permuted back from `order`, and sharded like a DTensor `like`."""
        entry, region = self.content["tensors"][name], self._region(name, like)
        if "pieces" in entry:
            dtype = dtype_of(entry["dtype"].removeprefix("torch."))
            shard = assembled(region, self._pieces(name, region), dtype)
        else:
            ((_, shard),) = self._pieces(name, region)
            shard = shard if order is None else put_in_order(order, shard)
            if like is not None:
                shard = shard[region.slices()].contiguous()
            if not mapped:
                shard = shard.clone()
        return shard if like is None else sharded_like(like, shard)

    def value(
        self, encoded: Any, *, likes: dict[str, Tensor] | None = None, mapped: bool = False
    ) -> Any:
        """Return a value with its tensors. With `mapped`, they may be mapped from files.

        likes: DTensors, by names of stored tensors which are to be sharded like them.
        """
        likes = likes or {}
        return decoded(
            encoded, lambda name, order: self.tensor(name, order, likes.get(name), mapped=mapped)
        )

    def _region(self, name: str, like: Tensor | None) -> Region:
        if like is not None:
            return shard_of(like, f"load: {name}").region
        shape = self.content["tensors"][name]["shape"]
        return Region([0] * len(shape), shape)

    def _pieces(self, name: str, region: Region) -> Iterator[tuple[Region, Tensor]]:
        """Return what is stored of a region, mapped from files: the whole tensor, or pieces."""
        entry = self.content["tensors"][name]
        for piece in entry.get("pieces", [entry]):
            where = Region(piece.get("start", [0] * len(piece["shape"])), piece["shape"])
            if "pieces" not in entry or all(where.overlap(region).shape):
                yield where, self._files[piece["file"]].read(name, piece["hash"])


def load(path: str | os.PathLike[str], *, rng: bool | None = None, **objects: Any) -> Loaded:
    """Load a checkpoint into objects, and return its step and values.

    All ranks call it. All that is loaded is compared with its hashes first, models with what was
    saved, and optimizers with the numbers of parameters that were saved. If anything differs, the
    error names it, on all ranks, and nothing is loaded.

    Args:
        path: A checkpoint, or the folder of a run, whose newest checkpoint is loaded.
        rng: Set the states of random number generators; the default is to do so if an optimizer is
            loaded. If another number of processes has saved them, True raises, and the default
            warns and leaves them out.
        **objects: What is loaded into, by the names of `save`. Each must be in the checkpoint. A
            warning says what is in the checkpoint and was not asked for, if any of them is an
            optimizer, a scheduler or a scaler.
            After a load without the optimizer, save into another folder: checkpoints with a new
            optimizer could replace those with the old one's state.

    Returns:
        The folder of the checkpoint, its step and its values.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged, or it does not fit the objects.
        TypeError: An object has no `state_dict` or `load_state_dict`.
        ImportError: safetensors or xxhash is missing: `pip install safetensors xxhash`.
    """
    check_arguments(path, objects, "load")
    resumes = any(hasattr(value, "param_groups") for value in objects.values())
    folder = get_from_rank_0(lambda: found(Path(path).absolute()))
    reader, parts, likes = run_on_all_ranks(lambda: _checked(folder, objects, resumes, rng))
    trains = any(hasattr(value, name) for value in objects.values() for name in OF_TRAINING)
    if trains and (left := reader.names() - objects.keys()):
        warnings.warn(
            f"load: {folder} has {', '.join(sorted(left))}, too, which is not loaded", stacklevel=2
        )

    def load_all() -> None:
        # Models come last. The states of others, which their own code checks, may still be refused.
        for name, value in sorted(objects.items(), key=lambda item: is_model(item[1])):
            load_state(value, parts[name], partial(reader.value, likes=likes))

    run_on_all_ranks(load_all)
    values = reader.value(parts["values"])
    if "rng" in parts:
        set_random_states(reader.value(parts["rng"]))
    return Loaded(folder, reader.content["step"], values)


def verify(path: str | os.PathLike[str]) -> Path:
    """Compare a whole checkpoint, or the newest one of a run, with its hashes.

    Args:
        path: A checkpoint, or the folder of a run.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: There is no checkpoint, or something differs, which the message names.
    """
    folder = found(path)
    reader = Reader(folder)
    for name in reader.content["tensors"]:
        reader.verify(name)
    return folder


def _checked(
    folder: Path, objects: dict[str, Any], resumes: bool, rng: bool | None
) -> tuple[Reader, dict[str, Any], dict[str, Tensor]]:
    """Return the parts to load, after they were compared with their hashes and with objects.

    Return, too, a DTensor for the name of each stored tensor that is to be sharded.
    """
    reader = Reader(folder)
    stored, tensors = reader.content["parts"], reader.content["tensors"]
    parts = {"values": stored["values"]}
    likes: dict[str, Tensor] = {}
    for name, value in objects.items():
        if name not in reader.names():
            names = ", ".join(sorted(reader.names()))
            raise CheckpointError(f"{folder}: it has no {name}, only {names or 'values'}")
        parts[name] = pick_for_this_rank(stored[name], name, folder)
        wrong = list(mistakes(value, tensors, parts[name]))
        if wrong:
            more = f"; and {len(wrong) - MOST_MISTAKES} more" if len(wrong) > MOST_MISTAKES else ""
            raise CheckpointError(f"{folder}: {name}: {'; '.join(wrong[:MOST_MISTAKES])}{more}")
        likes |= shardings(value, tensors, parts[name])
    if rng and "rng" not in stored:
        raise CheckpointError(f"{folder}: it was saved with rng=False")
    if "rng" in stored and (resumes if rng is None else rng):
        try:
            parts["rng"] = pick_for_this_rank(stored["rng"], "rng", folder)
        except CheckpointError as error:
            if rng:
                raise
            warnings.warn(
                f"load: {error}, so it is not loaded; pass rng=False to avoid this warning",
                stacklevel=5,
            )
    for name in tensors_of(list(parts.values())):
        reader.verify(name, likes.get(name))
    return reader, parts, likes
