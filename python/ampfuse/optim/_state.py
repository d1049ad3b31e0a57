"""What Adam keeps for a parameter: created at its first step, checked, loaded, rebuilt."""

from typing import Any

import torch
from torch import Tensor

from ampfuse._capture import is_capturing

HALVES = (torch.float16, torch.bfloat16)
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")

# Groups keep the name: tools that gather checkpoints over processes know no dtypes.
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def state_dtype_name(dtype: torch.dtype | str) -> str:
    """`"float32"` of `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def check_options(options: dict[str, Any]) -> None:
    """Refuse what no step could make sense of; torch's words where torch refuses it too."""
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    # A learning rate on a GPU is not looked at: the host would wait for it.
    if not (isinstance(lr, Tensor) and lr.device.type != "cpu") and not lr >= 0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if any(isinstance(beta, Tensor) for beta in betas):
        raise ValueError("betas: expected two floats, got a Tensor")
    for index in (0, 1):
        if not 0.0 <= betas[index] < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {betas[index]}")
    if not options["eps"] >= 0:
        raise ValueError(f"Invalid epsilon value: {options['eps']}")
    if not options["weight_decay"] >= 0:
        raise ValueError(f"Invalid weight_decay value: {options['weight_decay']}")
    master_weights = options["master_weights"]
    if not isinstance(master_weights, bool) and master_weights not in ("auto", "remainder"):
        raise ValueError(
            f'master_weights: expected "auto", True, False or "remainder", got {master_weights!r}'
        )
    if state_dtype_name(options["state_dtype"]) not in STATE_DTYPES:
        raise ValueError(
            f"state_dtype: expected torch.float32 or torch.bfloat16, got {options['state_dtype']}"
        )
    check_limit(options["max_grad_norm"])


def check_limit(max_grad_norm: float | None) -> None:
    """Refuse a norm that none is below."""
    if max_grad_norm is not None and not max_grad_norm >= 0:
        raise ValueError(f"max_grad_norm: expected None or at least 0, got {max_grad_norm}")


def check_params(group: dict[str, Any], index: int) -> None:
    """Refuse a group whose parameters cannot have the masters that it asks for."""
    if group["master_weights"] != "remainder":
        return
    for place, param in enumerate(group["params"]):
        if param.dtype == torch.float16:
            raise ValueError(
                f"master_weights='remainder': parameter {place} of group {index} is float16, and "
                "only bfloat16 has a remainder; use master_weights=True in a group of its own"
            )


Spares = dict[Tensor, Tensor]  # of parameters: masters that are to be made anew, in their place


def ensure(state: dict[str, Any], param: Tensor, group: dict[str, Any], spares: Spares) -> None:
    """Create what is missing of a parameter's state, and convert what is kept in another way."""
    if "step" not in state:
        refuse_in_capture()
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
    dtype = moment_dtype(param, group)
    for name in MOMENTS[: 3 if group["amsgrad"] else 2]:
        if name not in state:
            refuse_in_capture()
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        elif isinstance(state[name], Tensor) and state[name].dtype != dtype:
            state[name] = state[name].to(dtype)
    ensure_master(state, param, master_dtype(param, group), spares)


@torch.no_grad()
def ensure_master(
    state: dict[str, Any], param: Tensor, dtype: torch.dtype | None, spares: Spares
) -> None:
    """Of this dtype, or none."""
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
        # A model that was cast, or a group that keeps its masters in another way from now on.
        numbers = master
        if master.dtype == torch.int16:
            numbers = join(param, master) if param.dtype == torch.bfloat16 else param.detach()
        del state["master_param"]
        _put_master(state, numbers, param, dtype)


def refuse_in_capture() -> None:
    """State that a graph makes it would make anew at every replay."""
    if not torch.compiler.is_compiling() and is_capturing():
        raise RuntimeError(
            "this step would make the optimizer's state, and so would each replay of the graph "
            "that is being captured: take one step before"
        )


def moment_dtype(param: Tensor, group: dict[str, Any]) -> torch.dtype:
    """Of a parameter's moments: `state_dtype`, but what is more precise stays as it is."""
    if param.dtype in (*HALVES, torch.float32):
        return STATE_DTYPES[state_dtype_name(group["state_dtype"])]
    return param.dtype


def master_dtype(param: Tensor, group: dict[str, Any]) -> torch.dtype | None:
    """float32 for masters, int16 for remainders, None for parameters that need none."""
    wanted = group["master_weights"]
    if param.dtype not in HALVES or wanted is False:
        return None
    return torch.int16 if wanted == "remainder" else torch.float32


def new_master(param: Tensor, dtype: torch.dtype) -> Tensor:
    """The master of a parameter as it is: a bfloat16 number lacks no bits of its own."""
    if dtype == torch.int16:
        return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    return param.detach().to(dtype, memory_format=torch.preserve_format)


def renew_master(state: dict[str, Any], param: Tensor) -> None:
    """Make it from the parameter again, in its place."""
    master = state["master_param"]
    master.copy_(new_master(param, master.dtype))


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
    state: dict[Any, dict[str, Any]], groups: list[dict[str, Any]], saved: dict[str, Any]
) -> Spares:
    """Take over a state dictionary that was checked.

    Returns the masters of which it knows nothing. They are made anew at once, since a captured
    graph may take the next step, and at the next step again, since the model may be loaded last.
    """
    spares: Spares = {}
    owner = owners(groups, saved)
    loaded = {owner[key][0] if key in owner else key for key in saved["state"]}
    for key in [key for key in state if key not in loaded]:
        del state[key]
    for key, value in saved["state"].items():
        if key in owner:
            param, group = owner[key]
            load(state[param], value, param, group)
            if "master_param" in state[param] and "master_param" not in value:
                renew_master(state[param], param)
                spares[param] = state[param].pop("master_param")
        else:
            state[key] = value
    return spares


# Options that torch's groups have and ours do not.
TORCHS_OWN = ("foreach", "fused", "capturable", "differentiable")


def without_what_torch_ignored(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dictionary, and where torch's class saved it, no masters and no options of torch's.

    torch's class keeps masters that it was given, but does not step them.
    """
    groups, state = [], dict(saved["state"])
    for group in saved["param_groups"]:
        if any(name in group for name in TORCHS_OWN):
            for param in group["params"]:
                if param in state:
                    entries = state[param].items()
                    state[param] = {k: v for k, v in entries if k != "master_param"}
        groups.append({k: v for k, v in group.items() if k not in TORCHS_OWN})
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


def load(
    state: dict[str, Any], saved: dict[str, Any], param: Tensor, group: dict[str, Any]
) -> None:
    """Take over a saved state, whoever saved it, without moving tensors that are there already.

    Dtypes are those of the group's options: torch would cast everything to the parameter's.
    """
    of_master = master_dtype(param, group)
    for name in [name for name in state if name not in saved]:
        if name != "master_param" or of_master is None:
            del state[name]
    for name, value in saved.items():
        if name == "step":
            value = torch.as_tensor(value, dtype=torch.float32, device=param.device)
            _put(state, name, value.reshape(()))
        elif name in MOMENTS:
            _put(state, name, value, moment_dtype(param, group), param)
        elif name == "master_param":
            _put_master(state, value, param, of_master)
        else:
            state[name] = value.clone() if isinstance(value, Tensor) else value


def _put(
    state: dict[str, Any],
    name: str,
    value: Tensor,
    dtype: torch.dtype | None = None,
    like: Tensor | None = None,
) -> None:
    dtype = dtype or value.dtype
    like = value if like is None else like
    there = state.get(name)
    if not isinstance(there, Tensor) or (there.dtype, there.shape) != (dtype, like.shape):
        there = torch.empty_like(like, dtype=dtype, memory_format=torch.preserve_format)
        state[name] = there
    there.copy_(value)


def _put_master(
    state: dict[str, Any], value: Tensor, param: Tensor, dtype: torch.dtype | None
) -> None:
    if dtype is None:
        state.pop("master_param", None)
        if param.dtype not in HALVES:  # it is its own master now
            param.copy_(value)
    elif dtype == torch.int16:
        parameter, remainder = split(value.to(param.device, torch.float32))
        param.copy_(parameter)
        _put(state, "master_param", remainder, dtype, param)
    else:
        _put(state, "master_param", value, dtype, param)


def export_masters(optimizer: Any, saved: dict[str, Any]) -> None:
    """A hook that puts what is saved into an optimizer's state dictionary."""
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for param, key in zip(group["params"], saved_group["params"], strict=True):
            if key in saved["state"]:
                saved["state"][key] = exported(param, saved["state"][key])


def exported(param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state as it is saved: remainders as the float32 masters that they stand for.

    By themselves they mean nothing, and no collective operation knows their dtype.
    """
    master = state.get("master_param")
    if not isinstance(master, Tensor) or master.dtype != torch.int16:
        return state
    return {**state, "master_param": join(param, master)}


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 tensor as bfloat16 and remainders, as the kernels split it (math/remainder.h)."""
    bits = local(master).contiguous().view(torch.int32)
    upper = (bits + 0x8000) >> 16  # wraps around at the top of the negative NaNs, which go below
    upper = torch.where(local(master).isnan(), (bits >> 16) | 0x40, upper)
    bfloat16 = upper.to(torch.int16).view(torch.bfloat16)
    return sharded_like(master, bfloat16), sharded_like(master, bits.to(torch.int16))


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """The float32 tensor that `split` gave."""
    bfloat16 = local(param.detach()).contiguous()
    upper = bfloat16.view(torch.int16).to(torch.int32) << 16
    lower = local(remainder).contiguous().to(torch.int32)
    # A negative remainder brings its own sign bits, which is to borrow from the upper half.
    bits = torch.where(bfloat16.isnan(), upper | (lower & 0xFFFF), upper + lower)
    return sharded_like(param, bits.view(torch.float32))


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor; another tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. The compiler knows of their attributes, not of their methods."""
    return getattr(tensor, "device_mesh", None) is not None


def sharded_like(tensor: Tensor, shard: Tensor) -> Tensor:
    """A shard as a DTensor, if the other tensor is one."""
    if not is_sharded(tensor):
        return shard
    from torch.distributed.tensor import DTensor

    whole: Tensor = DTensor.from_local(
        shard,
        tensor.device_mesh,  # type: ignore[attr-defined]
        tensor.placements,  # type: ignore[attr-defined]
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return whole
