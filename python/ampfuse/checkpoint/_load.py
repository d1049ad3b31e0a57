"""`load` and `verify`: read a checkpoint, and compare all that is read with its hashes."""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ampfuse.checkpoint import _index
from ampfuse.checkpoint._errors import CheckpointError, required
from ampfuse.checkpoint._folder import found
from ampfuse.checkpoint._parts import check_parts, load_state, mistakes
from ampfuse.checkpoint._random import set_random_states
from ampfuse.checkpoint._ranks import from_rank_0, of_this_rank, on_all_ranks
from ampfuse.checkpoint._tensor_file import TensorFile
from ampfuse.checkpoint._tree import decoded, tensors_of

MOST_MISTAKES = 5  # in a message


class Loaded(NamedTuple):
    """The result of `load`."""

    path: Path
    step: int
    values: Any


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

    def tensor(self, name: str) -> Tensor:
        """Return a tensor, which may be mapped from its file."""
        entry = self.content["tensors"][name]
        return self._files[entry["file"]].read(name, entry["hash"])

    def verify(self, names: Iterable[str]) -> None:
        """Compare tensors with their hashes."""
        for name in names:
            self.tensor(name)

    def value(self, encoded: Any, *, mapped: bool = False) -> Any:
        """Return a value with its tensors. With `mapped`, they may be mapped from files."""
        return decoded(encoded, self.tensor if mapped else lambda name: self.tensor(name).clone())

    def kinds(self) -> dict[str, tuple[str, list[int]]]:
        """Return the dtype and shape of each tensor."""
        entries = self.content["tensors"].items()
        return {name: (entry["dtype"], entry["shape"]) for name, entry in entries}


def load(path: str | os.PathLike[str], *, rng: bool | None = None, **objects: Any) -> Loaded:
    """Load a checkpoint into objects, and return its step and values.

    path: a checkpoint, or the folder of a run, whose newest checkpoint is loaded.
    rng: set the states of random number generators; by default if an optimizer is loaded.
    objects: see `save`. Each must be in the checkpoint. A warning says what is in the checkpoint
        and was not asked for, if an optimizer is loaded.

    All processes of a group call it. All that is loaded is compared with its hashes first, and
    models and optimizers with what was saved. If anything differs, the error is a CheckpointError
    that names it, on all ranks, and nothing is loaded.
    """
    check_parts(objects, ("state_dict", "load_state_dict"), "load")
    resumes = any(hasattr(value, "param_groups") for value in objects.values())
    folder = from_rank_0(lambda: found(Path(path).absolute()))
    reader, parts = on_all_ranks(lambda: _checked(folder, objects, resumes, rng))
    if resumes and (left := reader.names() - objects.keys()):
        warnings.warn(
            f"load: {folder} has {', '.join(sorted(left))}, too, which is not loaded", stacklevel=2
        )

    def load_all() -> None:
        for name, value in objects.items():
            load_state(value, parts[name], reader.value)

    on_all_ranks(load_all)
    values = reader.value(parts["values"])
    if "rng" in parts:
        set_random_states(reader.value(parts["rng"]))
    return Loaded(folder, reader.content["step"], values)


def verify(path: str | os.PathLike[str]) -> Path:
    """Compare a whole checkpoint, or the newest one of a run, with its hashes; return its folder.

    Raise a CheckpointError that names what differs.
    """
    folder = found(path)
    reader = Reader(folder)
    reader.verify(reader.content["tensors"])
    return folder


def _checked(
    folder: Path, objects: dict[str, Any], resumes: bool, rng: bool | None
) -> tuple[Reader, dict[str, Any]]:
    """Return the parts to load, after they were compared with their hashes and with objects."""
    reader = Reader(folder)
    stored, kinds = reader.content["parts"], reader.kinds()
    parts = {"values": stored["values"]}
    for name, value in objects.items():
        if name not in reader.names():
            names = ", ".join(sorted(reader.names()))
            raise CheckpointError(f"{folder}: it has no {name}, only {names or 'values'}")
        parts[name] = of_this_rank(stored[name], name, folder)
        wrong = list(mistakes(value, kinds, parts[name]))
        if wrong:
            more = f"; and {len(wrong) - MOST_MISTAKES} more" if len(wrong) > MOST_MISTAKES else ""
            raise CheckpointError(f"{folder}: {name}: {'; '.join(wrong[:MOST_MISTAKES])}{more}")
    if rng and "rng" not in stored:
        raise CheckpointError(f"{folder}: it was saved with rng=False")
    if "rng" in stored and (resumes if rng is None else rng):
        parts["rng"] = of_this_rank(stored["rng"], "rng", folder)
    reader.verify(tensors_of(list(parts.values())))
    return reader, parts
