"""The folder of a run, which holds its checkpoints.

A checkpoint is written into a folder whose name begins with a dot, flushed to the disk, and
renamed. So it is complete or not there, whenever the process or the machine stops.
"""

import fcntl
import os
import re
import secrets
import shutil
import threading
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ampfuse.checkpoint import _index
from ampfuse.checkpoint._errors import CheckpointError
from ampfuse.checkpoint._tensor_file import flush

LOCK = ".lock"
UNFINISHED = ".unfinished-"
REMOVED = ".removed-"
# A step that is saved again has a second number, since a folder cannot be replaced in one go.
CHECKPOINT = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def numbers_of(path: Path) -> tuple[int, int]:
    """Return the step and the second number of a checkpoint's folder; -1 and 0 of other paths."""
    match = CHECKPOINT.fullmatch(path.name)
    return (int(match[1]), int(match[2] or 0)) if match else (-1, 0)


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the oldest step first."""
    paths = folder.iterdir() if folder.is_dir() else ()
    complete = (path for path in paths if (path / _index.NAME).is_file())
    return sorted((path for path in complete if numbers_of(path)[0] >= 0), key=numbers_of)


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a run's folder, or None.

    Args:
        path: The folder of a run, which need not exist.

    Returns:
        The folder of the checkpoint with the highest step.
    """
    return max(checkpoints(Path(path)), key=numbers_of, default=None)


def found(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint at a path: the path itself, or the newest one of a run."""
    folder = Path(path)
    if folder.is_file():
        raise CheckpointError(f"{folder}: this is a file; pass the folder that it is in")
    if (folder / _index.NAME).exists():
        return folder
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(f"{folder}: there is no complete checkpoint here")
    return newest


class Writing:
    """A checkpoint that is being written. Nobody else can write to the run until it is closed.

    One save of this process waits for another one. Saves of other processes are refused.
    """

    _in_process = threading.Lock()
    _thread: int | None = None  # the thread that saves, unless that is a background thread

    def __init__(self, folder: Path, step: int) -> None:
        if (folder / _index.NAME).exists():
            raise CheckpointError(f"{folder}: this is a checkpoint; pass the folder of the run")
        if Writing._thread == threading.get_ident():  # a signal handler, for example
            raise CheckpointError(f"{folder}: a save of this thread is under way")
        with ExitStack() as exits:
            Writing._in_process.acquire()
            exits.callback(Writing._in_process.release)
            exits.callback(self.hand_over)
            Writing._thread = threading.get_ident()
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            exits.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"{folder}: another process writes a checkpoint here now"
                ) from None
            except OSError as error:  # of a network file system, for example
                warnings.warn(
                    f"save: {folder} cannot be locked ({error.strerror}): make sure that no other "
                    "process saves there",
                    stacklevel=2,
                )
            else:  # forked processes have the file open, too
                exits.callback(fcntl.flock, lock, fcntl.LOCK_UN)
            for path in folder.iterdir():
                if path.name.startswith((UNFINISHED, REMOVED)):
                    remove(path)
            self.path = free_name(folder, step)
            # Each try has a name of its own, so that a slow process that writes for an earlier one
            # does not write into a later one.
            name = f"{UNFINISHED}{self.path.name}-{secrets.token_hex(4)}"
            self.unfinished = folder / name
            self.unfinished.mkdir()
            exits.callback(shutil.rmtree, self.unfinished, ignore_errors=True)
            self._exits = exits.pop_all()

    def hand_over(self) -> None:
        """Let a background thread close it, for which this thread may wait."""
        Writing._thread = None

    def finish(self, content: dict[str, Any], keep: int | None) -> None:
        """Write the index, give the folder its name, and remove old checkpoints."""
        _index.write(self.unfinished, content)
        flush(self.unfinished)
        self.unfinished.rename(self.path)
        flush(self.path.parent)
        remove_others(self.path, keep)
        newest = latest(self.path.parent)
        if newest != self.path:
            warnings.warn(
                f"save: {self.path.name} is not the latest checkpoint, which is {newest}; a new "
                "run needs a folder of its own",
                stacklevel=2,
            )

    def close(self) -> None:
        """Remove what is unfinished, and let others write."""
        self._exits.close()


def _forget_lock() -> None:
    """Forget, in a forked process, a save that only its parent does."""
    Writing._in_process, Writing._thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_lock)


def free_name(folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint that does not exist yet."""
    used = [second for first, second in map(numbers_of, folder.iterdir()) if first == step]
    name = f"step-{step:08}"
    return folder / (f"{name}.{max(used) + 1}" if used else name)


def remove_others(path: Path, keep: int | None) -> None:
    """Remove the other complete checkpoints of this step, and old ones of earlier steps.

    Of earlier steps the `keep` - 1 highest stay, or all if `keep` is None. Those of later steps
    stay, too: another run has saved them.
    """
    step = numbers_of(path)[0]
    others = [other for other in checkpoints(path.parent) if other != path]
    earlier = [other for other in others if numbers_of(other)[0] < step]
    old = [] if keep is None else earlier[: max(len(earlier) - (keep - 1), 0)]
    for other in others:
        if other in old or numbers_of(other)[0] == step:
            remove(other)


def remove(folder: Path) -> None:
    """Remove a folder, or warn. A checkpoint is renamed first, so that it is never half there."""
    try:
        if CHECKPOINT.fullmatch(folder.name):
            folder = folder.rename(folder.with_name(f"{REMOVED}{folder.name}"))
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"save: {folder} cannot be removed: {error}", stacklevel=2)
