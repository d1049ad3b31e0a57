"""`checkpoint.json`: what a checkpoint holds, and the hashes of its files. It is written last."""

import json
from pathlib import Path
from typing import Any

import torch

import ampfuse
from ampfuse.checkpoint._errors import CheckpointError
from ampfuse.checkpoint._tensor_file import flush, hash_of

NAME = "checkpoint.json"
FORMAT = 1
# The file begins with the hash of all that follows, so that it is JSON and yet holds its own hash.
BEGIN, END = b'{"hash": "', b'",\n'
HASH = 32  # hexadecimal digits


def write(folder: Path, content: dict[str, Any]) -> str:
    """Write the index to the disk, and return its hash, which covers the whole checkpoint."""
    versions = {"ampfuse": ampfuse.__version__, "torch": str(torch.__version__)}
    content = {"format": FORMAT, **versions, **content}
    rest = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()[1:] + b"\n"
    own = hash_of(rest)
    path = folder / NAME
    path.write_bytes(BEGIN + own.encode() + END + rest)
    flush(path)
    return own


def read(folder: Path) -> dict[str, Any]:
    """Return the index of a checkpoint."""
    path = folder / NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: there is no complete checkpoint here") from None
    start = len(BEGIN) + HASH + len(END)
    expected = BEGIN + hash_of(text[start:]).encode() + END
    if text[:start] != expected:
        raise CheckpointError(f"{path}: the file has changed since it was written")
    content: dict[str, Any] = json.loads(text)
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"{path}: written in format {content['format']} by ampfuse {content['ampfuse']}; "
            f"this version reads formats up to {FORMAT}"
        )
    return content
