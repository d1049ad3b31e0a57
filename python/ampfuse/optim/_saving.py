"""Saves state dicts of our optimizers."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampfuse.gradients.shards import is_dtensor
from ampfuse.optim import _coded, _state
from ampfuse.optim._callers import DCP, is_called_from
from ampfuse.optim._remainders import exported
from ampfuse.optim.options import TORCHS_OWN, drop_torchs_options


def saved_state_dict(optimizer: Any, decoded: bool) -> dict[str, Any]:
    """Return torch's state dict after `export`, and after the program's hooks, which run last."""
    hook = partial(export, decoded=decoded)
    handle = optimizer.register_state_dict_post_hook(hook, prepend=True)
    try:
        return Optimizer.state_dict(optimizer)
    finally:
        handle.remove()


def export(optimizer: Any, saved: dict[str, Any], *, decoded: bool) -> None:
    """Convert entries that are saved in another form than they are kept. This is a hook."""
    is_dcp = is_called_from(DCP)
    if optimizer._has_own_options:  # programs may add torch's options at any time
        torchs = TORCHS_OWN if is_dcp else {}
        groups = saved["param_groups"]
        saved["param_groups"] = [{**drop_torchs_options(group), **torchs} for group in groups]
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        if isinstance(saved_group["lr"], Tensor):  # loading and schedulers write it in place
            saved_group["lr"] = saved_group["lr"].clone()
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            if key in saved["state"]:
                state = _state.include_writes_in_state(param, saved["state"][key])
                state = _coded.exported(exported(param, state), optimizer._rule.moments)
                if is_dcp or decoded or is_dtensor(param):
                    state = _coded.decoded(state, optimizer._rule.moments)
                # DCP needs the same entries in what it saves and in what it loads.
                state = state if is_dcp else _state.drop_unset_moments(state, optimizer._rule)
                saved["state"][key] = state
