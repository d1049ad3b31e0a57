"""Reads and writes a scaler's state in the files of `torch::save(scaler, file)` in C++."""

from typing import Any

from ampfuse.amp._saved import ENTRIES, loadable
from ampfuse.cpp_archive._file import File, read_archive, write_archive


def load_cpp_scaler_state(file: File) -> dict[str, Any]:
    """Return the state dict of a scaler saved in C++, for `load_state_dict` here and in torch.

    The file is read as data: nothing in it is run, and a file that contains code is refused.

    >>> import tempfile, ampfuse
    >>> scaler = ampfuse.GradScaler("cpu", 128.0)
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     ampfuse.save_cpp_scaler_state(scaler.state_dict(), file.name)
    ...     ampfuse.load_cpp_scaler_state(file.name)["scale"]
    128.0
    """
    saved = read_archive(file)
    state = {name: saved[name] for name in ENTRIES if name in saved}
    if "scale" not in state:
        raise ValueError(f"{file}: expected a scaler that was saved in C++, got something else")
    return state


def save_cpp_scaler_state(state_dict: dict[str, Any], file: File) -> None:
    """Save a scaler's state dict, ours or torch's, for `torch::load(scaler, file)` in C++.

    If writing fails, an OSError is raised; a file given by its path keeps its old content.
    """
    write_archive(loadable(state_dict), file)
