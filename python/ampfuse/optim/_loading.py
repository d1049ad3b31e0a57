"""Loads state dicts of our optimizers or torch's.

Loading is all or nothing: everything is checked, then all new state is created, and only then is
any old state replaced.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampfuse._texts import listed
from ampfuse._warning import warn_caller
from ampfuse.gradients.shards import is_dtensor, shard_like
from ampfuse.optim import _coded, _state
from ampfuse.optim._adopting import adopt
from ampfuse.optim._callers import DCP, is_called_from
from ampfuse.optim._checks import check_fits, check_number, check_saved, check_tensor
from ampfuse.optim._columns import is_plain
from ampfuse.optim._rule import Rule, StateOptions
from ampfuse.optim.options import check_options, option


def load_into(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Load by torch's method, which checks and loads groups, and calls hooks and __setstate__."""
    loading: dict[str, Any] = {}

    def withhold_state(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        given = adopt(optimizer._rule, given)
        loading.update(given)
        return {**given, "state": {}}

    # This hook runs last before loading, since other hooks may change what is loaded.
    handle = optimizer.register_load_state_dict_pre_hook(withhold_state)
    optimizer._loading = loading
    try:
        Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        handle.remove()
        optimizer._loading = None


Owner = tuple[Tensor, dict[str, Any], int]  # a parameter, its group and its index there


def owners(groups: list[dict[str, Any]], saved: dict[str, Any]) -> dict[Any, Owner]:
    """Return the owner of each state in a state dict, by its key there."""
    return {
        saved_param: (param, group, index)
        for group, saved_group in zip(groups, saved["param_groups"], strict=True)
        for index, (param, saved_param) in enumerate(
            zip(group["params"], saved_group["params"], strict=True)
        )
    }


class NewState(NamedTuple):
    """The new state of a parameter."""

    entries: dict[str, Any]
    param: Tensor | None
    """The new value of the parameter itself, or None if it stays."""
    has_master: bool
    """True if the parameter has a master, saved or not."""


@torch.no_grad()
def new_states(
    rule: Rule, groups: list[dict[str, Any]], saved: dict[str, Any], own_options: dict[str, Any]
) -> dict[Tensor, NewState]:
    """Check the states of a state dict against their parameters; create new ones from them."""
    found = owners(groups, saved)
    for key, (param, _, index) in found.items():
        if key in saved["state"]:
            check_saved(rule, saved["state"][key], param, index)
    refuse_other_order(found, saved["state"])
    warn_of_lost_averages(groups, saved["state"], own_options)
    new = {
        param: _new_state(rule, saved["state"][key], param, rule.state_options(group, own_options))
        for key, (param, group, _) in found.items()
        if key in saved["state"]
    }
    if is_called_from(DCP):  # which loads the parameters by itself, before or after the optimizer
        new = {param: state._replace(param=None) for param, state in new.items()}
    return new


def warn_of_lost_averages(
    groups: list[dict[str, Any]], states: dict[Any, dict[str, Any]], own_options: dict[str, Any]
) -> None:
    """Warn if a state dict has averages, and no group has the option for them."""
    if any("ema_param" in state for state in states.values()) and all(
        option(group, "ema", own_options) is None for group in groups
    ):
        warn_caller(
            "loaded state dict: it has averages of the weights, and this optimizer has none, so "
            "they are dropped: pass for example ema=0.999 to keep them"
        )


def refuse_other_order(found: dict[Any, Owner], states: dict[Any, dict[str, Any]]) -> None:
    """Raise if loading would write masters to each other's parameters.

    States belong to parameters by their order. An optimizer that is made with another order of the
    parameters would move the weights of a model that was loaded before.
    """
    masters = {
        key: (param, states[key]["master_param"])
        for key, (param, _, _) in found.items()
        if key in states and isinstance(states[key].get("master_param"), Tensor)
    }
    for key, (param, master) in masters.items():
        if not is_plain(param) or not is_plain(master) or param.is_meta or master.is_meta:
            return
        value = rounded_master(master, param)
        if torch.equal(value, param) or bool((value == value.flatten()[0]).all()):
            continue  # norms and biases may be constant, and alike
        alike = {k: pair for k, pair in masters.items() if pair[0].shape == param.shape}
        goes_to = next((k for k, (one, _) in alike.items() if is_same(one, value)), None)
        if goes_to is None:
            return  # the model was not loaded before, so nothing is known
        for comes_from, (_, other) in alike.items():
            if is_same(rounded_master(other, param), param):
                raise ValueError(
                    f"loaded state dict: the master of parameter {key} is the value of parameter "
                    f"{goes_to}, and that of parameter {comes_from} its own: make the optimizer "
                    "with its parameters in the order that they had when it was saved"
                )
        return


def rounded_master(master: Tensor, param: Tensor) -> Tensor:
    """Return a master in its parameter's dtype, on its device."""
    return master.to(param.device, param.dtype)


def is_same(first: Tensor, second: Tensor) -> bool:
    """Return True if two tensors have the same dtype, device, shape and values."""
    is_alike = first.dtype == second.dtype and first.device == second.device
    return is_alike and torch.equal(first, second)


def _new_state(rule: Rule, saved: dict[str, Any], param: Tensor, options: StateOptions) -> NewState:
    """Create state in the dtypes of the group's options; torch would use the parameter's dtype."""
    of_master = _state.master_dtype(param, options)
    entries: dict[str, Any] = {}
    of_param = None
    for name, value in _with_moments(rule, saved, param, options).items():
        if name == "step":
            step = torch.as_tensor(value, dtype=torch.float32, device=param.device)
            entries[name] = step.reshape(()).clone()
        elif name in rule.moments and not options.is_coded:
            entries[name] = _state.converted(value, param, _state.moment_dtype(param, options))
        elif name == "ema_param":
            entries[name] = _state.converted(value, param, _state.ema_dtype(param, options))
        elif name == "master_param":
            master, of_param = _state.convert_master(value, param, of_master)
            if master is not None:
                entries[name] = master
        else:
            entries[name] = value.clone() if isinstance(value, Tensor) else value
    return NewState(entries, of_param, of_master is not None)


def _with_moments(
    rule: Rule, saved: dict[str, Any], param: Tensor, options: StateOptions
) -> dict[str, Any]:
    """Return saved state with moments as the group keeps them: as numbers, or in 8 bits."""
    state = dict(saved)
    for index, name in enumerate(rule.moments):
        codes, units = _coded.saved_names(name)
        if codes in state:
            # Codes stay if they are in the parameter's order of memory, which their groups follow.
            is_kept = options.is_coded and not is_dtensor(param)
            if is_kept and state[codes].stride() == param.stride():
                state[name] = state.pop(codes).to(param.device)
                state[units] = state[units].to(param.device)
                continue
            # Codes are those of whole tensors: shards are saved as numbers.
            number = _coded.decode(state.pop(codes), state.pop(units))
            state[name] = shard_like(param, number)
        if name in state and options.is_coded:
            number = _state.converted(state[name], param, torch.float32)
            state[name], state[units] = _coded.encode(number, is_signed=index == 0)
    return state


@torch.no_grad()
def put_states(
    state: dict[Any, dict[str, Any]],
    new: dict[Tensor, NewState],
    others: dict[Any, Any],
    in_place: bool,
) -> _state.Spares:
    """Replace the present states by new ones; `others` are states of no parameter.

    With `in_place`, values are copied to the present tensors. Otherwise the tensors are replaced,
    so that state dicts taken before keep the old ones, as in torch.

    Returns the masters that were not saved. They are set to their parameters at once, since a
    captured graph may take the next step, and again at the next eager step, since the model may be
    loaded after the optimizer.
    """
    spares: _state.Spares = {}
    for key in [key for key in state if key not in new]:
        del state[key]
    state.update(others)
    for param, (entries, of_param, has_master) in new.items():
        if in_place:
            master = _put_in_place(state[param], entries)
            if master is not None and has_master:
                state[param]["master_param"] = master
                _state.renew_master(state[param], param)
                spares[param] = state[param].pop("master_param")
        else:
            state[param] = entries
        if of_param is not None:
            param.copy_(of_param)
    return spares


def _put_in_place(there: dict[str, Any], entries: dict[str, Any]) -> Tensor | None:
    """Copy entries to the present state; return the present master if no master was saved."""
    master = there.get("master_param") if "master_param" not in entries else None
    for name in [name for name in there if name not in entries]:
        del there[name]
    for name, value in entries.items():
        old = there.get(name)
        fits = isinstance(old, Tensor) and isinstance(value, Tensor)
        if fits and (old.dtype, old.shape) == (value.dtype, value.shape):  # type: ignore[union-attr]
            old.copy_(value)  # type: ignore[union-attr]
        else:
            there[name] = value
    return master


def unowned_states(groups: list[dict[str, Any]], saved: dict[str, Any]) -> dict[Any, Any]:
    """Return the states of a state dict that belong to no parameter. They are kept, as in torch."""
    found = owners(groups, saved)
    return {key: value for key, value in saved["state"].items() if key not in found}


def keep_options(rule: Rule, loaded: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Check loaded groups; keep the dtypes of state, and options that the loaded groups lack."""
    for index, (new, old) in enumerate(zip(loaded, groups, strict=True)):
        for name in ("master_weights", rule.moment_dtype, "ema_dtype"):
            new.pop(name, None)
        if new.get("ema") is None:  # C++ saves options that are not set, too
            new.pop("ema", None)
        for name in old.keys() - {*rule.needed_options}:
            new.setdefault(name, old[name])
        missing = sorted({*rule.needed_options} - new.keys())
        if missing:
            raise KeyError(
                f"loaded state dict: group {index} lacks {' and '.join(missing)}: expected "
                f"{listed(rule.needed_options)}; is it the state of another optimizer?"
            )
        check_number(f"loaded state dict: lr of group {index}", new["lr"], may_be_meta=False)
        try:
            check_options(rule, new)
        except (ValueError, TypeError) as error:
            raise type(error)(f"loaded state dict: group {index}: {error}") from None


def checked_masters(groups: list[dict[str, Any]], saved: dict[str, Any]) -> dict[Tensor, Tensor]:
    """Return the masters in a state dict by parameter; raise if one does not fit."""
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    if sizes != saved_sizes:
        raise ValueError(
            "loaded state dict contains a parameter group that doesn't match the size of "
            f"optimizer's group: expected groups of {sizes} parameters, got {saved_sizes}"
        )
    masters = {}
    for key, (param, _, index) in owners(groups, saved).items():
        state = saved["state"].get(key)
        if isinstance(state, dict) and "master_param" in state:
            where = f"loaded state dict: master_param of parameter {index}"
            check_tensor(where, state["master_param"], param.is_meta)
            check_fits(where, state["master_param"], param)
            masters[param] = state["master_param"]
    return masters


def keep_rates(loaded: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Copy loaded rates to the present tensors; groups with different rates stop sharing one."""
    indices: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        if isinstance(group["lr"], Tensor) and "lr" in loaded[index]:
            indices.setdefault(id(group["lr"]), []).append(index)
    for sharing in indices.values():
        rate = groups[sharing[0]]["lr"]
        values = [
            torch.as_tensor(loaded[index]["lr"], dtype=torch.float64, device=rate.device).reshape(
                rate.shape
            )
            for index in sharing
        ]
        numbers = {value.item() for value in values} if len(values) > 1 else set()
        if rate.is_floating_point() and len(numbers) <= 1:
            rate.copy_(values[0])
            values = [rate] * len(values)
        else:
            dtype = rate.dtype if rate.is_floating_point() else torch.float64
            values = [value.to(rate.device, dtype, copy=True) for value in values]
        for index, value in zip(sharing, values, strict=True):
            loaded[index]["lr"] = value
