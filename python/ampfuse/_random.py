"""The states of all random number generators that a program may use."""

import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """Return the states of Python, of NumPy if the program has imported it, and of torch."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Set the states. GPUs that this machine does not have are left out.

    A C++ program has saved only those of torch.
    """
    torch.set_rng_state(states["torch"])
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        from numpy.random import set_state

        set_state(states["numpy"])
    for device, state in enumerate(states.get("cuda", ())):
        if device < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
