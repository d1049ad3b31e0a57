"""Keeps what a program saves while it is measured in places that only this process sees."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ampfuse import checkpoint
from ampfuse.tools.replacing import replace


@contextmanager
def saved_in_memory() -> Iterator[None]:
    """Let `torch.save` write to files that only this process sees, by `torch.load`.

    Otherwise the weights of a measurement would overwrite others.
    """
    save: Any = torch.save
    load: Any = torch.load
    files: dict[str, bytes] = {}

    # Parameters have torch's names, since programs may pass them by name.
    def save_in_memory(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            save(obj, f, *args, **kwargs)
            return
        written = io.BytesIO()
        save(obj, written, *args, **kwargs)
        files[os.path.abspath(f)] = written.getvalue()

    def load_from_memory(f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike) and os.path.abspath(f) in files:
            kwargs["mmap"] = False
            f = io.BytesIO(files[os.path.abspath(f)])
        return load(f, *args, **kwargs)

    with ExitStack() as exits:
        replace(exits, torch, "save", save_in_memory)
        replace(exits, torch, "load", load_from_memory)
        yield


@contextmanager
def checkpoints_in(folder: Path) -> Iterator[None]:
    """Let `ampfuse.checkpoint` save runs into this folder, and find these there again.

    The runs of the program itself stay as they are, and are found until it saves.
    """
    save, runs = checkpoint.save, dict[str, Path]()

    def save_there(path: str | os.PathLike[str], **kwargs: Any) -> checkpoint.Saving:
        run = runs.setdefault(os.path.abspath(path), folder / f"run{len(runs)}")
        return save(run, **kwargs)

    def from_there(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: str | os.PathLike[str], **kwargs: Any) -> Any:
            return function(runs.get(os.path.abspath(path), path), **kwargs)

        return read

    with ExitStack() as exits:
        replace(exits, checkpoint, "save", save_there)
        for name in ("latest", "load", "verify"):
            replace(exits, checkpoint, name, from_there(getattr(checkpoint, name)))
        yield
