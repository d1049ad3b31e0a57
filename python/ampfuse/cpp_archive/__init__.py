"""Exchanges states with C++, in the files of `torch::save`."""

from ampfuse.cpp_archive._optimizer import load_cpp_optimizer_state, save_cpp_optimizer_state
from ampfuse.cpp_archive._scaler import load_cpp_scaler_state, save_cpp_scaler_state

__all__ = [
    "load_cpp_optimizer_state",
    "load_cpp_scaler_state",
    "save_cpp_optimizer_state",
    "save_cpp_scaler_state",
]
