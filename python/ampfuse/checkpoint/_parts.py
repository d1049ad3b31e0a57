"""The parts of each object in a checkpoint: its state, and for models gradients, too."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ampfuse._nested import tensors_in
from ampfuse.amp import GradScaler, ScaleRecord
from ampfuse.amp.gate import Gate
from ampfuse.checkpoint._tree import is_tensor, kind_of, tensors_of
from ampfuse.gradients.shards import is_dtensor
from ampfuse.ops import decode_moment
from ampfuse.optim import SGD, Adam

METHODS = ("state_dict", "load_state_dict")  # of objects whose state is saved
PLAIN = (int, float, str, dict, list, tuple, Tensor)
# Entries of optimizers' states that have the shape of the parameter.
SHAPED_LIKE_PARAMS = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "master_param",
    "ema_param",
)
METADATA = "_metadata"  # of a module's state dict: the versions of its layers


def unwrapped(value: Any) -> Any:
    """Return the model inside of torch.compile and DistributedDataParallel."""
    while True:
        if isinstance(value, DistributedDataParallel | DataParallel):
            value = value.module
        elif isinstance(inner := getattr(value, "_orig_mod", None), nn.Module):
            value = inner
        else:
            return value


def is_model(value: Any) -> bool:
    """Return True for a module, also inside of torch.compile and DistributedDataParallel."""
    return isinstance(unwrapped(value), nn.Module)


def check_arguments(path: Any, objects: dict[str, Any], function: str) -> None:
    """Refuse an object in place of the path, and objects without a state."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"{function}: path: expected a str or a Path, got {type(path).__name__}; objects come "
            "after the path, by names, for example model=model"
        )
    for name, value in objects.items():
        if not all(callable(getattr(value, method, None)) for method in METHODS):
            hint = ""
            if name == "loader":
                hint = "; torchdata.stateful_dataloader.StatefulDataLoader has them"
            elif function == "save" and isinstance(value, PLAIN):
                hint = f"; numbers and texts are saved in values={{'{name}': ...}}"
            raise TypeError(
                f"{function}: {name}: expected an object with {' and '.join(METHODS)}, "
                f"got {type(value).__name__}{hint}"
            )


def state_of(value: Any, *, gradients: bool) -> dict[str, Any]:
    """Return the parts of the state of an object."""
    value = unwrapped(value)
    # Shards of FSDP1 look like whole tensors. It is known by its name, since its import takes long.
    kinds = map(type, value.modules()) if isinstance(value, nn.Module) else ()
    if any(kind.__name__ == "FullyShardedDataParallel" for kind in kinds):
        raise TypeError(
            "save: models of FullyShardedDataParallel are not supported; those of "
            "torch.distributed.fsdp.fully_shard are"
        )
    state = value.state_dict()
    if hasattr(value, "param_groups"):
        check_shards(value)
    parts = {"class": class_of(value), "state": state}
    if isinstance(value, GradScaler) and value.is_enabled():
        parts["history"] = value._history.records()
    if isinstance(value, nn.Module):
        parts[METADATA] = dict(getattr(state, METADATA, {}))
        if gradients:
            parts["gradients"] = {
                name: param.grad
                for name, param in value.named_parameters()
                if param.grad is not None
            }
    return parts


def class_of(value: Any) -> str:
    """Return the name of an object's class; of a gated scheduler, that of the scheduler."""
    return type(value.scheduler if isinstance(value, Gate) else value).__name__


def check_shards(optimizer: Any) -> None:
    """Refuse state of sharded parameters that could not be sharded again.

    When it is loaded, only the parameters say how to.
    """
    for param, state in getattr(optimizer, "state", {}).items():
        if not isinstance(param, Tensor) or not is_dtensor(param):
            continue
        for name, value in state.items():
            if name.endswith("_units") and name.removesuffix("_units") in state:
                continue  # 8-bit moments of shards are saved as float32
            place = f"{name} of {type(optimizer).__name__}"
            if not isinstance(value, Tensor):
                refuse_shards(value, place)
            elif value.dim() and not (is_dtensor(value) and value.shape == param.shape):
                raise TypeError(
                    f"save: {place}: expected a DTensor of shape {list(param.shape)} like its "
                    f"parameter, got {type(value).__name__} of shape {list(value.shape)}"
                )


def refuse_shards(state: Any, name: str) -> None:
    """Refuse DTensors where nothing says how to shard them when they are loaded."""
    if any(map(is_dtensor, tensors_in(state))):
        raise TypeError(f"save: {name}: only models and optimizers may have DTensors")


def mistakes(value: Any, tensors: dict[str, Any], parts: dict[str, Any]) -> Iterator[str]:
    """Yield why stored parts do not fit an object. `tensors`: what the index says of tensors."""
    value = unwrapped(value)
    if isinstance(value, nn.Module):
        if METADATA not in parts:
            yield f"the checkpoint has the state of {parts['class']}, which was no module"
            return
        yield from _mistakes_of_model(value.state_dict(), tensors, parts["state"])
        grads = parts.get("gradients", {})
        for name, param in value.named_parameters() if grads else ():
            dtype = kind_of(grads[name], tensors)[0] if name in grads else None
            own = getattr(param, "grad_dtype", param.dtype)
            if None not in (own, dtype) and dtype != str(own):
                yield f"the gradient of {name} is {dtype} in the checkpoint, and {own} in the model"
    elif class_of(value) != parts["class"]:
        yield f"the checkpoint has the state of {parts['class']}, not of {class_of(value)}"
    elif has_torchs_state(value, parts["state"]):
        yield from _mistakes_of_optimizer(value.param_groups, tensors, parts["state"])
    elif isinstance(value, TorchGradScaler) and value.is_enabled() and not parts["state"]:
        yield "the checkpoint has the state of a disabled scaler, and this one is enabled"


def _mistakes_of_model(
    state: dict[str, Any], tensors: dict[str, Any], stored: dict[str, Any]
) -> Iterator[str]:
    for name in (name for name in stored if name not in state):
        yield f"the checkpoint has {name}, which the model lacks"
    for name, value in state.items():
        if name not in stored:
            yield f"the model has {name}, which the checkpoint lacks"
            continue
        reference = stored[name]
        if is_extra(name) or not isinstance(value, Tensor) or not isinstance(reference, dict):
            continue
        dtype, shape = kind_of(reference, tensors)
        if (dtype, shape) != (str(value.dtype), list(value.shape)):
            yield (
                f"{name} is {dtype} of shape {shape} in the checkpoint, and {value.dtype} of shape "
                f"{list(value.shape)} in the model"
            )


def has_torchs_state(value: Any, stored: dict[str, Any]) -> bool:
    """Return True for an optimizer whose state dict is not of a form of its own."""
    return hasattr(value, "param_groups") and stored.keys() >= {"param_groups", "state"}


def _states_of_params(
    groups: list[Any], stored: dict[str, Any]
) -> Iterator[tuple[Tensor, int, dict[str, Any]]]:
    """Yield each parameter with its number and its encoded state."""
    params = [param for group in groups for param in group["params"]]
    for number, state in stored["state"].get("$dict", ()):
        if isinstance(number, int) and number < len(params) and isinstance(state, dict):
            yield params[number], number, state


def _mistakes_of_optimizer(
    groups: list[Any], tensors: dict[str, Any], stored: dict[str, Any]
) -> Iterator[str]:
    sizes = [len(group["params"]) for group in groups]
    stored_sizes = [len(group["params"]) for group in stored["param_groups"]]
    if sizes != stored_sizes:
        yield f"its groups have {sizes} parameters, those in the checkpoint {stored_sizes}"
    for param, number, state in _states_of_params(groups, stored):
        for name in filter(lambda name: is_tensor(state.get(name)), SHAPED_LIKE_PARAMS):
            shape = kind_of(state[name], tensors)[1]
            if shape != list(param.shape):
                yield (
                    f"{name} of parameter {number} has shape {shape} in the checkpoint, and the "
                    f"parameter has {list(param.shape)}"
                )


def shardings(value: Any, tensors: dict[str, Any], parts: dict[str, Any]) -> dict[str, Tensor]:
    """Return, for the name of each stored tensor that is to be sharded, a DTensor like it."""
    value = unwrapped(value)
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, nn.Module):
        state = parts["state"]
        pairs = [(current, state.get(name)) for name, current in value.state_dict().items()]
        grads = parts.get("gradients", {})
        pairs += [(param, grads.get(name)) for name, param in value.named_parameters()]
    elif has_torchs_state(value, parts["state"]):
        for param, _, state in _states_of_params(value.param_groups, parts["state"]):
            # Whole 8-bit moments are sharded after they are decoded.
            coded = [name for name in state if name.removesuffix("_codes") + "_units" in state]
            pairs += [(param, entry) for name, entry in state.items() if name not in coded]
    likes = {}
    for like, stored in pairs:
        if isinstance(like, Tensor) and is_dtensor(like) and is_tensor(stored):
            (name,) = tensors_of(stored)
            # A number, such as Adam's step, has the shape of a parameter without dimensions. It is
            # sharded only if it was stored in pieces.
            is_like = kind_of(stored, tensors)[1] == list(like.shape)
            if is_like and (like.dim() or "pieces" in tensors[name]):
                likes[name] = like
    return likes


def load_state(value: Any, part: dict[str, Any], read: Callable[..., Any]) -> None:
    """Load the parts into an object. `read` returns the value of what is encoded."""
    value = unwrapped(value)
    if isinstance(value, nn.Module):
        _load_model(value, part, read)
        return
    state = read(part["state"])
    if has_torchs_state(value, state) and not isinstance(value, Adam | SGD):
        state = {**state, "state": {key: without_codes(one) for key, one in state["state"].items()}}
    value.load_state_dict(state)
    if isinstance(value, GradScaler) and value.is_enabled():
        value._history.put_records(
            [ScaleRecord(*record) for record in read(part.get("history", []))]
        )


def without_codes(state: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter's state with numbers in place of 8-bit moments, which only ours knows."""
    result = dict(state)
    for name in [name.removesuffix("_units") for name in state if name.endswith("_units")]:
        if f"{name}_codes" in state:
            codes, units = (result.pop(f"{name}_{part}") for part in ("codes", "units"))
            result[name] = decode_moment(codes, units)
    return result


def _load_model(model: nn.Module, part: dict[str, Any], read: Callable[..., Any]) -> None:
    stored = part["state"].items()
    state = OrderedDict((name, read(value, mapped=not is_extra(name))) for name, value in stored)
    setattr(state, METADATA, read(part[METADATA]))
    if "gradients" in part:
        grads = read(part["gradients"])
        for name, param in model.named_parameters():
            param.grad = grads[name].to(param.device) if name in grads else None
    model.load_state_dict(state)


def is_extra(name: str) -> bool:
    """Return True for state that a module makes and reads itself."""
    return name.rpartition(".")[2] == "_extra_state"
