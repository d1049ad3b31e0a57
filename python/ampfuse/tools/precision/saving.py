"""Keeps what a program saves while it is measured in places that only this process sees."""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ampfuse.tools.hooks import hook_saving


@contextmanager
def saved_in_memory() -> Iterator[None]:
    """Let `torch.save` write to files that only this process sees, by `torch.load`.

    Otherwise the weights of a measurement would overwrite others.
    """
    files: dict[str, bytes] = {}

    # Parameters have torch's names, since programs may pass them by name.
    def in_memory(save: Any) -> Any:
        def save_in_memory(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            if not isinstance(f, str | os.PathLike):
                save(obj, f, *args, **kwargs)
                return
            written = io.BytesIO()
            save(obj, written, *args, **kwargs)
            files[os.path.abspath(f)] = written.getvalue()

        return save_in_memory

    def from_memory(load: Any) -> Any:
        def load_from_memory(f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, str | os.PathLike) and os.path.abspath(f) in files:
                kwargs["mmap"] = False
                f = io.BytesIO(files[os.path.abspath(f)])
            return load(f, *args, **kwargs)

        return load_from_memory

    with ExitStack() as exits:
        hook_saving(exits, {"save": in_memory, "load": from_memory}, {})
        yield


@contextmanager
def checkpoints_in(folder: Path) -> Iterator[None]:
    """Let `ampfuse.checkpoint` save runs into this folder, and find these there again.

    The runs of the program itself stay as they are, and are found until it saves.
    """
    runs: dict[str, Path] = {}

    def there(save: Any) -> Callable[..., Any]:
        def save_there(path: str | os.PathLike[str], **kwargs: Any) -> Any:
            run = runs.setdefault(os.path.abspath(path), folder / f"run{len(runs)}")
            return save(run, **kwargs)

        return save_there

    def from_there(function: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: str | os.PathLike[str], **kwargs: Any) -> Any:
            return function(runs.get(os.path.abspath(path), path), **kwargs)

        return read

    with ExitStack() as exits:
        reading = dict.fromkeys(("latest", "load", "verify"), from_there)
        hook_saving(exits, {}, {"save": there, **reading})
        yield
