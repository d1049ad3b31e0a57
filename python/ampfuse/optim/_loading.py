"""State dictionaries of Adam's: what is saved, and how that or torch's is loaded."""

from typing import Any

import torch
from torch import Tensor

from ampfuse.optim._options import NEEDED, Kept, Option, has_torchs, kept, without_torchs
from ampfuse.optim._rates import keep_rates
from ampfuse.optim._remainders import exported
from ampfuse.optim._state import (
    MOMENTS,
    Spares,
    master_dtype,
    moment_dtype,
    put,
    put_master,
    renew_master,
)


def export(optimizer: Any, saved: dict[str, Any]) -> None:
    """A hook that puts into a state dictionary what is not as it is kept."""
    if optimizer._has_own_options:  # programs may put torch's there at any time
        saved["param_groups"] = [without_torchs(group) for group in saved["param_groups"]]
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        if isinstance(saved_group["lr"], Tensor):  # which loading and schedulers write
            saved_group["lr"] = saved_group["lr"].clone()
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            if key in saved["state"]:
                saved["state"][key] = exported(param, saved["state"][key])


Owner = tuple[Tensor, dict[str, Any]]  # a parameter and its group


def owners(groups: list[dict[str, Any]], saved: dict[str, Any]) -> dict[Any, Owner]:
    """Whose the states of a state dictionary are."""
    return {
        saved_param: (param, group)
        for group, saved_group in zip(groups, saved["param_groups"], strict=True)
        for param, saved_param in zip(group["params"], saved_group["params"], strict=True)
    }


def check_all(groups: list[dict[str, Any]], saved: dict[str, Any]) -> None:
    """Refuse a state dictionary before anything of it is loaded."""
    for key, owner in owners(groups, saved).items():
        if key in saved["state"]:
            check_saved(saved["state"][key], *owner)


@torch.no_grad()
def load_all(
    state: dict[Any, dict[str, Any]],
    groups: list[dict[str, Any]],
    saved: dict[str, Any],
    option: Option,
    in_place: bool,
) -> Spares:
    """Take over a state dictionary that was checked.

    `in_place`: into the tensors that are there. Else there are new ones, and state dictionaries
    that were taken before keep theirs, as torch's do.

    Returns the masters that it lacks. They are made anew at once, since a captured graph may take
    the next step, and at the next step again, since the model may be loaded last.
    """
    spares: Spares = {}
    owner = owners(groups, saved)
    loaded = {owner[key][0] if key in owner else key for key in saved["state"]}
    for key in [key for key in state if key not in loaded]:
        del state[key]
    for key, value in saved["state"].items():
        if key in owner:
            param, group = owner[key]
            if not in_place:
                state[param] = {}
            load(state[param], value, param, kept(group, option))
            if "master_param" in state[param] and "master_param" not in value:
                renew_master(state[param], param)
                spares[param] = state[param].pop("master_param")
        else:
            state[key] = value
    return spares


def keep_options(
    loaded: list[dict[str, Any]], groups: list[dict[str, Any]], defaults: dict[str, Any]
) -> None:
    """In loaded groups: how state is kept, rates in tensors, and what torch's checkpoints lack."""
    for new, old in zip(loaded, groups, strict=True):
        for name in {"master_weights", "state_dtype"} & defaults.keys():
            new[name] = old[name]
        for name in old.keys() - NEEDED:
            new.setdefault(name, old[name])
    keep_rates(loaded, groups)


def without_what_torch_ignored(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dictionary, and where torch's class saved it, no masters and no options of torch's.

    torch's class keeps masters that it was given, but does not step them.
    """
    groups, state = [], dict(saved["state"])
    for group in saved["param_groups"]:
        if has_torchs(group):
            for param in group["params"]:
                if param in state:
                    entries = state[param].items()
                    state[param] = {k: v for k, v in entries if k != "master_param"}
        groups.append(without_torchs(group))
    return {**saved, "state": state, "param_groups": groups}


def check_saved(saved: dict[str, Any], param: Tensor, group: dict[str, Any]) -> None:
    """Refuse a state that is another parameter's, or another optimizer's."""
    place = next(i for i, other in enumerate(group["params"]) if other is param)
    if saved and not saved.keys() >= {"step", "exp_avg", "exp_avg_sq"}:
        raise KeyError(f"loaded state dict: parameter {place} has but {sorted(saved)}")
    for name in (*MOMENTS, "master_param"):
        value = saved.get(name)
        if value is not None and value.shape != param.shape:
            raise ValueError(
                f"loaded state dict: {name} of parameter {place}: expected shape "
                f"{tuple(param.shape)}, got {tuple(value.shape)}"
            )
    master = saved.get("master_param")
    if master is not None and not master.is_floating_point():
        raise ValueError(
            f"loaded state dict: master_param of parameter {place}: expected a floating-point "
            f"tensor, as state_dict() gives also of remainders, got {master.dtype}"
        )


def load(state: dict[str, Any], saved: dict[str, Any], param: Tensor, kept: Kept) -> None:
    """Take over a saved state, whoever saved it, into tensors that are there already.

    Dtypes are those of the group's options: torch would cast everything to the parameter's.
    """
    of_master = master_dtype(param, kept)
    for name in [name for name in state if name not in saved]:
        if name != "master_param" or of_master is None:
            del state[name]
    for name, value in saved.items():
        if name == "step":
            value = torch.as_tensor(value, dtype=torch.float32, device=param.device)
            put(state, name, value.reshape(()))
        elif name in MOMENTS:
            put(state, name, value, moment_dtype(param, kept), param)
        elif name == "master_param":
            put_master(state, value, param, of_master)
        else:
            state[name] = value.clone() if isinstance(value, Tensor) else value
