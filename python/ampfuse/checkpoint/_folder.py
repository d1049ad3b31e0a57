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
from pathlib import Path

from ampfuse.checkpoint import _index
from ampfuse.checkpoint._errors import CheckpointError
from ampfuse.checkpoint._tensor_file import flush

LOCK = ".lock"
UNFINISHED = ".unfinished-"
REMOVED = ".removed-"
# A step that is saved again has a second number, since a folder cannot be replaced in one go.
CHECKPOINT = re.compile(r"step-(\d{8,})(?:\.(\d+))?")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the oldest step first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = CHECKPOINT.fullmatch(path.name)
        if match and (path / _index.NAME).is_file():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a run's folder, or None.

    Args:
        path: The folder of a run, which need not exist.

    Returns:
        The folder of the checkpoint with the highest step.
    """
    return next(reversed(checkpoints(Path(path))), None)


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


class RunLock:
    """Keeps others from writing to a run until it is released.

    One save of this process waits for another one. Saves of other processes are refused.
    """

    _in_process = threading.Lock()
    _thread: int | None = None  # the thread that saves, unless that is a background thread

    def __init__(self, folder: Path) -> None:
        if RunLock._thread == threading.get_ident():  # a signal handler, for example
            raise CheckpointError(f"{folder}: a save of this thread is under way")
        RunLock._in_process.acquire()
        RunLock._thread = threading.get_ident()
        self._file: int | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointError(
                    f"{folder}: another process writes a checkpoint here now"
                ) from None
        except BaseException:
            self.release()
            raise

    def hand_over(self) -> None:
        """Let a background thread release it, for which this thread may wait."""
        RunLock._thread = None

    def release(self) -> None:
        """Release the lock."""
        RunLock._thread = None
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # forked processes have the file open, too
            os.close(self._file)
        RunLock._in_process.release()


def _forget_lock() -> None:
    """Forget, in a forked process, a save that only its parent does."""
    RunLock._in_process, RunLock._thread = threading.Lock(), None


os.register_at_fork(after_in_child=_forget_lock)


def free_name(folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint that does not exist yet."""
    numbers = [number for number, _ in of_step(folder, step)]
    name = f"step-{step:08}"
    return folder / (f"{name}.{max(numbers) + 1}" if numbers else name)


def unfinished_folder(path: Path) -> Path:
    """Return a new folder to write into, which will be renamed to `path`.

    The caller has locked the run. Each try has a name of its own, so that a slow process that
    writes for an earlier one does not write into a later one.
    """
    for other in path.parent.iterdir():
        if other.name.startswith((UNFINISHED, REMOVED)):
            remove(other)
    unfinished = path.parent / f"{UNFINISHED}{path.name}-{secrets.token_hex(4)}"
    unfinished.mkdir()
    return unfinished


def put_in_place(unfinished: Path, path: Path) -> None:
    """Give a folder its name, after all of its content is on the disk."""
    flush(unfinished)
    unfinished.rename(path)
    flush(path.parent)


def of_step(folder: Path, step: int) -> list[tuple[int, Path]]:
    """Return the folders of a step, complete or not, with their second numbers."""
    matches = [(CHECKPOINT.fullmatch(path.name), path) for path in folder.iterdir()]
    return [
        (int(match[2] or 0), path) for match, path in matches if match and int(match[1]) == step
    ]


def remove_others(path: Path, step: int, keep: int | None) -> None:
    """Remove the other complete checkpoints of this step, and old ones of other steps.

    Those of the `keep` - 1 highest other steps stay, or all if `keep` is None.
    """
    folder = path.parent
    every = checkpoints(folder)
    same = {other for _, other in of_step(folder, step)}
    others = [other for other in every if other not in same]
    old = [] if keep is None else others[: max(len(others) - (keep - 1), 0)]
    for other in (*(other for other in every if other in same and other != path), *old):
        remove(other)


def remove(folder: Path) -> None:
    """Remove a folder, or warn. A checkpoint is renamed first, so that it is never half there."""
    try:
        if CHECKPOINT.fullmatch(folder.name):
            folder = folder.rename(folder.with_name(f"{REMOVED}{folder.name}"))
        shutil.rmtree(folder)
    except OSError as error:
        warnings.warn(f"save: {folder} cannot be removed: {error}", stacklevel=2)
