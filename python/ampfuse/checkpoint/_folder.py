"""The folder of a run, which holds its checkpoints.

A checkpoint is written into a folder whose name begins with a dot, flushed to the disk, and
renamed. So it is complete or not there, whenever the process or the machine stops.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ampfuse.checkpoint import _index
from ampfuse.checkpoint._errors import CheckpointError
from ampfuse.checkpoint._tensor_file import flush

LOCK = ".lock"
UNFINISHED = ".unfinished-"
REMOVED = ".removed-"
# A step that is saved again has a second number, since a folder cannot be replaced in one go.
CHECKPOINT = re.compile(r"step-(\d+)(?:\.(\d+))?")


def checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, the oldest step first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = CHECKPOINT.fullmatch(path.name)
        if match and (path / _index.NAME).is_file():
            found.append((int(match[1]), int(match[2] or 0), path))
    return [path for *_, path in sorted(found)]


def latest(path: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a run's folder, or None."""
    return next(reversed(checkpoints(Path(path))), None)


def found(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint at a path: the path itself, or the newest one of a run."""
    folder = Path(path)
    if (folder / _index.NAME).exists():
        return folder
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(f"{folder}: there is no complete checkpoint here")
    return newest


def lock(folder: Path) -> int:
    """Return a file that keeps other processes from writing to a run until it is closed.

    It waits for a save of this process that runs in the background.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
                raise
            holder = os.pread(file, 100, 0).decode()
            if holder != str(os.getpid()):
                raise CheckpointError(
                    f"{folder}: process {holder} writes a checkpoint here now"
                ) from None
            fcntl.flock(file, fcntl.LOCK_EX)
        os.truncate(file, 0)
        os.pwrite(file, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(file)
        raise
    return file


def free_name(folder: Path, step: int) -> Path:
    """Return the folder of a checkpoint that does not exist yet."""
    numbers = [number for number, _ in of_step(folder, step)]
    name = f"step-{step:08}"
    return folder / (f"{name}.{max(numbers) + 1}" if numbers else name)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Return a folder to write into, which has its name after the end of the context.

    The caller has locked the run.
    """
    for other in path.parent.iterdir():
        if other.name.startswith((UNFINISHED, REMOVED)):
            shutil.rmtree(other)
    unfinished = path.parent / f"{UNFINISHED}{path.name}"
    unfinished.mkdir()
    try:
        yield unfinished
        flush(unfinished)
        unfinished.rename(path)
        flush(path.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def of_step(folder: Path, step: int) -> list[tuple[int, Path]]:
    """Return the folders of a step, complete or not, with their second numbers."""
    matches = [(CHECKPOINT.fullmatch(path.name), path) for path in folder.iterdir()]
    return [
        (int(match[2] or 0), path) for match, path in matches if match and int(match[1]) == step
    ]


def remove_others(path: Path, step: int, keep: int | None) -> None:
    """Remove other checkpoints of a step, and all but `keep` of those with the highest steps."""
    folder = path.parent
    same = {other for _, other in of_step(folder, step)}
    others = [other for other in checkpoints(folder) if other not in same]
    old = [] if keep is None else others[: max(len(others) - (keep - 1), 0)]
    for other in (*(same - {path}), *old):
        removed = folder / f"{REMOVED}{other.name}"
        other.rename(removed)
        shutil.rmtree(removed)
