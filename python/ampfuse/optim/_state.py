"""The state that an optimizer keeps for a parameter: how it is created, converted and renewed."""

from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse._graphs import is_capturing
from ampfuse.gradients.mistakes import has_number
from ampfuse.gradients.shards import local, sharded_like
from ampfuse.optim import _coded
from ampfuse.optim._remainders import exported, join, split
from ampfuse.optim._rule import Rule, StateOptions
from ampfuse.optim.options import MOMENT_DTYPES, dtype_name

Spares = dict[Tensor, Tensor]  # by parameter: masters that the next step sets to the parameter


def ensure_in(
    states: dict[Tensor, dict[str, Any]], param: Tensor, options: StateOptions, spares: Spares
) -> dict[str, Any]:
    """Create and convert a parameter's state, and return it. State without entries is not kept."""
    state = states.get(param, {})
    ensure(state, param, options, spares)
    if state:
        states[param] = state
    return state


def ensure(state: dict[str, Any], param: Tensor, options: StateOptions, spares: Spares) -> None:
    """Create missing entries of a parameter's state, and convert entries of another dtype."""
    of_master = master_dtype(param, options)
    missing = [name for name in options.moments if state.get(name) is None]
    if options.counts_steps:
        # A step whose counter is 0 sets the average, too, so an average keeps its counter. Then the
        # first step with momentum differs from torch's by the dampening.
        has_average = state.get("ema_param") is not None
        restarts = bool(missing) and options.first_step_sets_moments and not has_average
        if "step" not in state or restarts:
            refuse_in_capture()
            # The program may have put moments into the state: they count as set.
            has_set = options.first_step_sets_moments and options.moments and not missing
            count = 1.0 if has_set else 0.0
            state["step"] = torch.full((), count, dtype=torch.float32, device=param.device)
        else:  # other code may have put it on the host, as torch does
            state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=param.device)
    if missing:
        refuse_in_capture()
    for index, name in enumerate(options.moments):
        if options.is_coded:
            ensure_codes(state, param, name, is_signed=index == 0)
        else:
            ensure_moment(state, param, name, moment_dtype(param, options))
    ensure_master(state, param, of_master, spares)
    ensure_ema(state, param, options)


def ensure_moment(state: dict[str, Any], param: Tensor, name: str, dtype: torch.dtype) -> None:
    """Create a moment of zeros, or convert one of another dtype."""
    moment = _coded.find(state, name)
    state.pop(_coded.units_name(name), None)
    if moment is None:
        moment = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    state[name] = moment.to(dtype) if isinstance(moment, Tensor) else moment


def ensure_codes(state: dict[str, Any], param: Tensor, name: str, is_signed: bool) -> None:
    """Create a moment of zeros in 8 bits, or encode one that is there as numbers."""
    moment, units = state.get(name), _coded.units_name(name)
    if moment is None:
        state[name], state[units] = _coded.new_codes(param, is_signed)
    elif units not in state:
        state[name], state[units] = _coded.encode(moment, is_signed)


@torch.no_grad()
def ensure_ema(state: dict[str, Any], param: Tensor, options: StateOptions) -> None:
    """Create, convert or delete the average. At first it is what the next step changes."""
    if not options.has_ema:
        state.pop("ema_param", None)
        return
    dtype = ema_dtype(param, options)
    if state.get("ema_param") is None:
        refuse_in_capture()
        stepped = exported(param, state).get("master_param", param.detach())
        state["ema_param"] = stepped.to(dtype, copy=True, memory_format=torch.preserve_format)
    elif state["ema_param"].dtype != dtype:
        state["ema_param"] = state["ema_param"].to(dtype)


def ema_dtype(param: Tensor, options: StateOptions) -> torch.dtype:
    """Return the dtype of a parameter's average: float64 and complex parameters have their own."""
    if param.dtype not in (*DTYPES_16_BIT, torch.float32):
        return param.dtype
    return MOMENT_DTYPES[dtype_name(options.ema_dtype or torch.float32)]


@torch.no_grad()
def ensure_master(
    state: dict[str, Any], param: Tensor, dtype: torch.dtype | None, spares: Spares
) -> None:
    """Create, convert or delete the master, so that it has this dtype (None: no master)."""
    master = state.get("master_param")
    if master is None and dtype is not None:
        refuse_in_capture()
        spare = spares.pop(param, None)
        fresh = new_master(param, dtype)
        if spare is not None and (spare.dtype, spare.shape) == (dtype, fresh.shape):
            state["master_param"] = spare.copy_(fresh)
        else:
            state["master_param"] = fresh
    elif master is not None and master.dtype != dtype:
        # The model was cast, or the group's `master_weights` was changed.
        numbers = include_writes(param, master) if master.dtype == torch.float32 else master
        if master.dtype == torch.int16:
            numbers = join(param, master) if param.dtype == torch.bfloat16 else param.detach()
        del state["master_param"]
        now = convert_master(numbers, param, dtype)
        if now.master is not None:
            state["master_param"] = now.master
        if now.param is not None:
            param.copy_(now.param)


def refuse_in_capture() -> None:
    """Raise during a capture, since the graph would create the state again at every replay."""
    if is_capturing():
        raise RuntimeError(
            "this step would create the optimizer's state, and each replay of the captured graph "
            "would create it again: take one step before the capture"
        )


def moment_dtype(param: Tensor, options: StateOptions) -> torch.dtype:
    """Return the dtype of a parameter's moments.

    float64 and complex parameters have moments of their own dtype, and others of the option.
    Without one, moments have the parameter's dtype, as in torch, except that those of float16 are
    float32: squares exceed the range of float16.
    """
    if param.dtype not in (*DTYPES_16_BIT, torch.float32):
        return param.dtype
    if options.moment_dtype is None:
        return torch.float32 if param.dtype == torch.float16 else param.dtype
    return MOMENT_DTYPES[dtype_name(options.moment_dtype)]


def master_dtype(param: Tensor, options: StateOptions) -> torch.dtype | None:
    """Return float32 for masters, int16 for remainders, or None for parameters without either."""
    if param.dtype not in DTYPES_16_BIT or options.master_weights in (False, "stochastic"):
        return None
    return torch.int16 if options.master_weights == "remainder" else torch.float32


def new_master(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a master that equals the parameter. A remainder is then zero."""
    if dtype == torch.int16:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return param.detach().to(dtype, memory_format=torch.preserve_format)


def renew_master(state: dict[str, Any], param: Tensor) -> None:
    """Set the master to the parameter, in place."""
    master = state["master_param"]
    master.copy_(new_master(param, master.dtype))


def is_written_over(param: Tensor, master: Tensor, dtype: torch.dtype) -> Tensor:
    """Return which elements of a parameter are not its float32 master, rounded to this dtype."""
    then = master.to(dtype).to(param.dtype)
    return (then != param) & ~(then.isnan() & param.isnan())


@torch.no_grad()
def adopt_param(param: Tensor, master: Tensor) -> Tensor:
    """Make a float32 master adopt the elements of its parameter that other code has written.

    In those elements the parameter is no longer its master rounded. Returns a 0-dim flag on the
    device: True if there are any.
    """
    is_written = is_written_over(param, master, param.dtype)
    master.copy_(torch.where(is_written, param.to(master.dtype), master))
    return is_written.any()


@torch.no_grad()
def include_writes(param: Tensor, master: Tensor) -> Tensor:
    """Return a float32 master, or a copy that has adopted what other code wrote to its parameter.

    The host waits. If the model was cast since the last step, the parameter was float16 or bfloat16
    then.
    """
    here, there = local(param.detach()), local(master)
    if not has_number(there) or (here.shape, here.device) != (there.shape, there.device):
        return master
    dtypes = [here.dtype] if here.dtype in DTYPES_16_BIT else DTYPES_16_BIT
    is_written = reduce(torch.logical_and, (is_written_over(here, there, one) for one in dtypes))
    if not is_written.any():
        return master
    return sharded_like(master, torch.where(is_written, here.to(there.dtype), there))


def include_writes_in_state(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with what other code has written to the parameter since its step.

    The present master stays as it is. Perhaps the program writes the old values back, for example
    after it has saved averaged weights.
    """
    master = state.get("master_param")
    if not isinstance(master, Tensor) or master.dtype != torch.float32:
        return state
    return {**state, "master_param": include_writes(param, master)}


def drop_unset_moments(state: dict[str, Any], rule: Rule) -> dict[str, Any]:
    """Return a parameter's state without moments that no step has set. The host waits.

    Torch's class would take their zeros for momentum.
    """
    step = state.get("step")
    if not rule.first_step_sets_moments or not isinstance(step, Tensor) or not has_number(step):
        return state
    if local(step).item() != 0:
        return state
    unset = {entry for name in rule.moments for entry in (name, *_coded.saved_names(name))}
    return {name: value for name, value in state.items() if name not in unset}


def converted(value: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of this dtype, with the parameter's layout in memory."""
    copy = torch.empty_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return copy.copy_(value)


class ConvertedMaster(NamedTuple):
    """A float32 master, converted to the form in which a group keeps masters."""

    master: Tensor | None
    """float32, an int16 remainder, or None if the parameter has neither."""
    param: Tensor | None
    """The parameter's new value, so that it fits the master; None if it stays."""


def convert_master(value: Tensor, param: Tensor, dtype: torch.dtype | None) -> ConvertedMaster:
    """Convert a float32 master to `dtype`, the result of `master_dtype`."""
    if dtype is None:
        is_own_master = param.dtype not in DTYPES_16_BIT
        return ConvertedMaster(None, value if is_own_master else None)
    if dtype == torch.int16:
        parameter, remainder = split(value.to(param.device, torch.float32))
        return ConvertedMaster(converted(remainder, param, dtype), parameter)
    return ConvertedMaster(converted(value, param, dtype), value)
