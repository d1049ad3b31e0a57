"""Adopts state dicts, which torch's class or a distributed checkpoint may have made."""

from typing import Any

from torch import Tensor

from ampfuse.optim import _coded
from ampfuse.optim._callers import DCP, is_called_from
from ampfuse.optim._checks import decoded_names, kind_of
from ampfuse.optim._rule import Rule
from ampfuse.optim.options import drop_torchs_options, has_torchs


def adopt(rule: Rule, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict, perhaps torch's, without torch's options, and with our state only."""
    is_dcp = is_called_from(DCP)
    if not isinstance(saved.get("state"), dict):
        found = kind_of(saved.get("state"))
        raise TypeError(f"loaded state dict: state: expected a dict, got {found}")
    groups, state = [], dict(saved["state"])
    for group in saved["param_groups"]:
        is_torchs = has_torchs(group) and not is_dcp
        for param in group["params"]:
            if isinstance(state.get(param), dict):
                state[param] = adopt_entries(rule, state[param], is_torchs)
        groups.append(drop_torchs_options(group))
    return {**saved, "state": state, "param_groups": groups}


def adopt_entries(rule: Rule, saved: dict[str, Any], is_torchs: bool) -> dict[str, Any]:
    """Return a parameter's state without what torch's class cannot have written.

    That class keeps masters, averages, counters and codes that it has loaded, but it does not step
    them. A distributed checkpoint has masters only if ours saved it, since torch's class asks it
    for none. It has an empty dict for an entry that flattened state lacks.
    """
    entries = {name: value for name, value in saved.items() if not is_empty_dict(value)}
    if is_torchs:
        codes = [name for moment in rule.moments for name in _coded.saved_names(moment)]
        for name in ("master_param", "ema_param", *codes):
            entries.pop(name, None)
    if not rule.first_step_sets_moments:
        return entries
    for name in rule.moments:
        if entries.get(name) is None:  # torch's state without momentum
            entries.pop(name, None)
        elif isinstance(entries[name], Tensor) and entries[name].is_sparse:
            entries[name] = entries[name].to_dense()  # torch's function steps sparse ones, too
    if is_torchs:
        entries.pop("step", None)
    if "step" not in entries and decoded_names(rule, entries) & {*rule.moments}:
        entries["step"] = 1.0  # at least one step has set the moments
    return entries


def is_empty_dict(value: Any) -> bool:
    return isinstance(value, dict) and not value
