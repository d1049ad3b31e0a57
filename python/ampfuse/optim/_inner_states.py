"""The state dicts of `Mastered`: those of the inner optimizer, with each master as `master_param`.

An optimizer without masters keeps those of a state dict that it loads, and saves them again, but
does not step them. So a state dict has two signs that its masters are current: an entry `MARK`
beside `state` and `param_groups`, which no other class saves, and groups without the options
that torch's classes have. `ampfuse.AdamW`, `Adam` and `SGD` save and know the second sign only.
"""

from collections import defaultdict
from typing import Any

from torch import Tensor

from ampfuse.optim import _state
from ampfuse.optim._adopting import is_empty_dict
from ampfuse.optim._callers import DCP, is_called_from
from ampfuse.optim._checks import kind_of
from ampfuse.optim._inner import refuse_options_of_others
from ampfuse.optim._loading import owners
from ampfuse.optim.options import TORCHS_OWN, drop_torchs_options, has_torchs

MARK = "has_current_masters"


def with_masters(
    state: dict[Any, Any], pairs: list[tuple[Tensor, Tensor]]
) -> defaultdict[Any, Any]:
    """Return the inner optimizer's state by parameter; `pairs` are parameters and masters."""
    params = {master: param for param, master in pairs}
    found: defaultdict[Any, Any] = defaultdict(dict)
    for key, value in state.items():
        found[params.get(key, key) if isinstance(key, Tensor) else key] = value
    for param, master in pairs:
        found[param] = {**found[param], "master_param": master.detach()}
    return found


def export(optimizer: Any, saved: dict[str, Any]) -> None:
    """Add both signs, and let masters adopt what other code has written. This is a hook."""
    for key, (param, _, _) in owners(optimizer.param_groups, saved).items():
        if key in saved["state"]:
            saved["state"][key] = _state.include_writes_in_state(param, saved["state"][key])
    if not is_called_from(DCP):  # which needs all options of the present groups, and keeps no mark
        saved["param_groups"] = list(map(drop_torchs_options, saved["param_groups"]))
        saved[MARK] = True


def adopt(inner: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with all options of the inner optimizer, and current masters only."""
    if not isinstance(saved.get("state"), dict):
        found = kind_of(saved.get("state"))
        raise TypeError(f"loaded state dict: state: expected a dict, got {found}")
    for group in saved["param_groups"]:
        refuse_options_of_others(group, inner.defaults)
    keeps_masters = has_current_masters(inner, saved)
    state = {}
    for key, entries in saved["state"].items():
        if isinstance(entries, dict) and "master_param" in entries:
            master = entries["master_param"]
            if not keeps_masters or is_empty_dict(master):  # flattened state without masters
                entries = {name: entries[name] for name in entries if name != "master_param"}
        state[key] = entries
    groups = saved["param_groups"]
    if len(groups) == len(inner.param_groups):  # other numbers are refused later
        present = [
            {name: group[name] for name in TORCHS_OWN if name in group}
            for group in inner.param_groups
        ]
        groups = [{**own, **group} for own, group in zip(present, groups, strict=True)]
    return {**saved, "state": state, "param_groups": groups}


def has_current_masters(inner: Any, saved: dict[str, Any]) -> bool:
    """Return True if the masters in a state dict, if there are any, were stepped by its class.

    A distributed checkpoint has masters only if ours saved it: other classes ask it for none.
    """
    if is_called_from(DCP):
        return True
    if any(map(has_torchs, saved["param_groups"])):
        return False
    return MARK in saved or any(map(has_torchs, inner.param_groups))


def without_masters(saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict for the inner optimizer, with copies of tensors."""
    state = {}
    for key, entries in saved["state"].items():
        if isinstance(entries, dict):
            entries = {name: copied(entries[name]) for name in entries if name != "master_param"}
            if not entries:
                continue
        state[key] = entries
    return {**saved, "state": state}


def copied(value: Any) -> Any:
    """Return a copy of a tensor, and other values as they are."""
    return value.clone() if isinstance(value, Tensor) else value
