"""Reads and writes optimizer state in the files of `torch::save(optimizer, file)` in C++.

Such a file is a TorchScript module without code. Its attribute `state` has one module for each
parameter. `param_groups` has one for each group, which lists the names of its parameters' modules
and has its options in another module. The length and the items of a list are attributes of their
own: "params/size", "params/0".
"""

from collections.abc import Callable
from typing import Any

import torch

from ampfuse.cpp_archive._file import File, archive, read_archive, write_archive
from ampfuse.cpp_archive._values import Module

_TENSORS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master_param")
# The options, and conversions to the types that C++ expects: it does not accept an int as a double.
_OPTIONS: dict[str, Callable[[Any], Any]] = {
    "lr": float,
    "betas": lambda betas: (float(betas[0]), float(betas[1])),
    "eps": float,
    "weight_decay": float,
    "amsgrad": bool,
    "maximize": bool,
    "decoupled_weight_decay": bool,
    "max_grad_norm": lambda limit: None if limit is None else float(limit),
    "write_back_grads": bool,
}


def load_cpp_optimizer_state(file: File) -> dict[str, Any]:
    """Read the state dict of an optimizer saved in C++, `ampfuse::AdamW` or one of torch's.

    This loads nothing into an optimizer: pass the result to `optimizer.load_state_dict`. The file
    is read as data: nothing in it is run, and a file that contains code is refused.

    Args:
        file: A path, or a binary file that is open for reading.

    Returns:
        A state dict for `load_state_dict` of `ampfuse.Adam`, `ampfuse.AdamW` and torch's classes.
        Its tensors are on the CPU.

    Raises:
        ValueError: The file is not an Adam or AdamW saved in C++, or is damaged.
        OSError: The file cannot be read.

    Examples:
        >>> import tempfile, torch, ampfuse
        >>> optimizer = ampfuse.AdamW([torch.zeros(2)], lr=0.25)
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     ampfuse.save_cpp_optimizer_state(optimizer.state_dict(), file.name)
        ...     state = ampfuse.load_cpp_optimizer_state(file.name)
        >>> optimizer.load_state_dict(state)
        >>> state["param_groups"][0]["lr"]
        0.25
    """
    saved = read_archive(file)
    try:
        return _state_dict(saved)
    except Exception as error:  # any error, since any entry may have any type
        raise ValueError(
            f"{file}: expected an Adam or AdamW optimizer that was saved in C++, got something else"
        ) from error


def _state_dict(saved: Module) -> dict[str, Any]:
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    params = 0
    for of_group in _list(saved["param_groups"], "param_groups"):
        keys = _list(of_group, "params")
        for param, key in enumerate(keys, start=params):
            if key in saved["state"]:
                states[param] = _state(saved["state"][key])
        options = {
            name: of_group["options"][name] for name in _OPTIONS if name in of_group["options"]
        }
        groups.append({**options, "params": list(range(params, params + len(keys)))})
        params += len(keys)
    return {"state": states, "param_groups": groups}


def _list(module: Module, name: str) -> list[Any]:
    return [module[f"{name}/{i}"] for i in range(int(module[f"{name}/size"]))]


def _state(module: Module) -> dict[str, Any]:
    tensors = {name: module[name] for name in _TENSORS if name in module}
    return {"step": torch.tensor(float(module["step"]), device="cpu"), **tensors}


def save_cpp_optimizer_state(state_dict: dict[str, Any], file: File) -> None:
    """Save an optimizer's state dict for `torch::load(optimizer, file)` in C++.

    A learning rate in a tensor becomes a number. Options that C++ does not have are left out.

    Args:
        state_dict: The result of `state_dict()` of Adam or AdamW, ampfuse's or torch's.
        file: A path, or a binary file that is open for writing.

    Raises:
        OSError: Writing fails; a file given by its path then keeps its old content.
    """
    states = {}
    for param, state in state_dict["state"].items():
        tensors = {name: state[name] for name in _TENSORS if name in state}
        states[str(param)] = archive({"step": int(state["step"]), **tensors})
    groups = [
        archive(
            {
                **_numbered("params", [str(param) for param in group["params"]]),
                "options": archive(
                    {name: to(group[name]) for name, to in _OPTIONS.items() if name in group}
                ),
            }
        )
        for group in state_dict["param_groups"]
    ]
    content = {
        "pytorch_version": "1.5.0",  # the version of the layout
        "state": archive(states),
        "param_groups": archive(_numbered("param_groups", groups)),
    }
    write_archive(content, file)


def _numbered(name: str, values: list[Any]) -> dict[str, Any]:
    items = {f"{name}/{i}": value for i, value in enumerate(values)}
    return {f"{name}/size": torch.tensor(len(values), device="cpu"), **items}
