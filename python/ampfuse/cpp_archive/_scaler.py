"""Reads and writes a scaler's state in the files of `torch::save(scaler, file)` in C++."""

from typing import Any

from ampfuse.amp._saved import ENTRIES, loadable
from ampfuse.cpp_archive._file import File, read_archive, write_archive


def load_cpp_scaler_state(file: File) -> dict[str, Any]:
    """Read the state dict of a scaler saved in C++.

    This loads nothing into a scaler: pass the result to `scaler.load_state_dict`. The file is read
    as data: nothing in it is run, and a file that contains code is refused.

    Args:
        file: A path, or a binary file that is open for reading.

    Returns:
        A state dict for `load_state_dict` of `ampfuse.GradScaler` and of torch's.

    Raises:
        ValueError: The file is not a scaler saved in C++, or is damaged.
        OSError: The file cannot be read.

    Examples:
        >>> import tempfile, ampfuse
        >>> scaler = ampfuse.GradScaler("cpu", 128.0)
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     ampfuse.save_cpp_scaler_state(scaler.state_dict(), file.name)
        ...     state = ampfuse.load_cpp_scaler_state(file.name)
        >>> scaler.load_state_dict(state)
        >>> state["scale"]
        128.0
    """
    saved = read_archive(file)
    state = {name: saved[name] for name in ENTRIES if name in saved}
    if "scale" not in state:
        raise ValueError(f"{file}: expected a scaler that was saved in C++, got something else")
    return state


def save_cpp_scaler_state(state_dict: dict[str, Any], file: File) -> None:
    """Save a scaler's state dict for `torch::load(scaler, file)` in C++.

    Args:
        state_dict: The result of `state_dict()` of a scaler, ours or torch's.
        file: A path, or a binary file that is open for writing.

    Raises:
        KeyError: An entry of torch's is missing.
        ValueError: An entry is out of range.
        OSError: Writing fails; a file given by its path then keeps its old content.
    """
    write_archive(loadable(state_dict), file)
