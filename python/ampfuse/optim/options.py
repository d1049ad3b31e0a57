"""The options of Adam's groups, and their checks."""

from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ampfuse._arguments import described, is_flag
from ampfuse._warning import warn_caller

# Groups hold the dtype's name: tools that gather checkpoints from ranks do not support dtypes.
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

LARGEST_BFLOAT16_BETA = 1 - 2**-8  # the largest second beta for moments in bfloat16

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")  # entries of a state, of the same dtype

# The options that torch does not have, with the values that stand for torch's behaviour. Only the
# optimizer holds the constructor's values; a group holds those that were set for it. So groups in
# state dicts have the same keys as in torch, for tools that match checkpoints by key.
OURS = {
    "master_weights": False,
    "state_dtype": None,
    "max_grad_norm": None,
    "write_back_grads": False,
}

# Options that choose one of torch's implementations, with torch's defaults. Only the groups of
# torch's optimizers have them.
TORCHS_OWN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}

_ALWAYS_FUSED = "the step is always fused: drop foreach, fused, capturable and differentiable"
REMEDIES = dict.fromkeys(TORCHS_OWN, _ALWAYS_FUSED)  # hints for arguments that torch's class has

# A loaded group that lacks one of these is not Adam's, but perhaps another optimizer's.
NEEDED = {"lr", "betas", "eps", "weight_decay"}


def has_torchs(group: dict[str, Any]) -> bool:
    """Return True if a group has options of torch's class. That class would not update masters."""
    return any(name in group for name in TORCHS_OWN)


def drop_torchs_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return the group without the options that only torch's groups have."""
    return {name: value for name, value in group.items() if name not in TORCHS_OWN}


def option(group: dict[str, Any], name: str, own: dict[str, Any]) -> Any:
    """Return a group's value of one of our options, or the optimizer's `own`."""
    return group.get(name, own[name])


def limits_of(groups: list[dict[str, Any]], own: dict[str, Any]) -> list[float | None]:
    """Return the limit that each group has of its own, or None."""
    return [option(group, "max_grad_norm", own) for group in groups]


class StateOptions(NamedTuple):
    """The options that decide which state a parameter has, and its dtypes."""

    master_weights: bool | str
    state_dtype: str | torch.dtype | None
    amsgrad: bool


def state_options(group: dict[str, Any], own: dict[str, Any]) -> StateOptions:
    """Return the options of a group that decide on the state of its parameters."""
    return StateOptions(
        option(group, "master_weights", own), option(group, "state_dtype", own), group["amsgrad"]
    )


def state_dtype_name(dtype: torch.dtype | str) -> str:
    """Return `"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def plain(group: dict[str, Any]) -> dict[str, Any]:
    """Convert betas and flags to Python's own types, since others cannot be saved and loaded."""
    betas = group["betas"]
    if not isinstance(betas, list | tuple) and are_two_numbers(betas):
        group["betas"] = tuple(float(beta) for beta in betas)
    return plain_flags(group)


def plain_flags(options: dict[str, Any]) -> dict[str, Any]:
    """Convert flags to Python's own type."""
    for name in ("amsgrad", "maximize", "decoupled_weight_decay", "write_back_grads"):
        if name in options and is_flag(options[name]):
            options[name] = bool(options[name])
    return options


def check_initial(options: dict[str, Any]) -> None:
    """Raise for invalid initial options, with torch's message if torch raises too."""
    check_options(options)
    lr = options["lr"]
    # A learning rate on a GPU is not checked: the host would wait for it.
    if not (isinstance(lr, Tensor) and lr.device.type != "cpu") and not lr >= 0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not options["weight_decay"] >= 0:
        raise ValueError(f"Invalid weight_decay value: {options['weight_decay']}")


def check_options(options: dict[str, Any]) -> None:
    """Raise for options that no step can use.

    Schedules may set learning rates and weight decay below 0, as in torch.
    """
    lr, betas = options["lr"], options["betas"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or lr.is_complex():
            raise ValueError("Tensor lr must be 1-element")
    elif not is_number(lr):
        raise TypeError(f"lr: expected a number or a tensor, got {described(lr)}")
    if not are_two_numbers(betas):
        if isinstance(betas, list | tuple) and any(isinstance(beta, Tensor) for beta in betas):
            raise ValueError("betas: expected two floats, got a Tensor")
        raise TypeError(f"betas: expected two numbers, got {described(betas)}")
    for name in ("eps", "weight_decay"):
        if not is_number(options[name]):
            raise TypeError(f"{name}: expected a number, got {described(options[name])}")
    for name in ("amsgrad", "maximize", "decoupled_weight_decay"):
        if not is_flag(options[name]):
            raise TypeError(f"{name}: expected a bool, got {described(options[name])}")
    for index in (0, 1):
        if not 0.0 <= betas[index] < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {betas[index]}")
    if not options["eps"] >= 0:
        raise ValueError(f"Invalid epsilon value: {options['eps']}")
    if options["weight_decay"] != options["weight_decay"]:  # NaN; isnan refuses very large ints
        raise ValueError(f"Invalid weight_decay value: {options['weight_decay']}")
    check_ours(options)


def check_ours(options: dict[str, Any]) -> None:
    """Raise for invalid values of the options that torch does not have."""
    master_weights = option(options, "master_weights", OURS)
    if not isinstance(master_weights, bool) and master_weights not in ("auto", "remainder"):
        raise ValueError(
            f'master_weights: expected "auto", True, False or "remainder", got {master_weights!r}'
        )
    state_dtype = option(options, "state_dtype", OURS)
    if not is_flag(option(options, "write_back_grads", OURS)):
        raise TypeError(
            f"write_back_grads: expected a bool, got {described(options['write_back_grads'])}"
        )
    if state_dtype is not None and state_dtype_name(state_dtype) not in STATE_DTYPES:
        raise ValueError(
            f"state_dtype: expected torch.float32 or torch.bfloat16, got {state_dtype}"
        )
    check_limit(option(options, "max_grad_norm", OURS))


def warn_of_slow_decay(group: dict[str, Any], own: dict[str, Any]) -> None:
    """Warn of a second moment in bfloat16 that can grow but not shrink.

    Multiplied by a beta above 1 - 2**-8, a number may lose less than half of bfloat16's last bit,
    and is rounded to what it was.
    """
    is_bfloat16 = option(group, "state_dtype", own) in ("bfloat16", torch.bfloat16)
    if is_bfloat16 and group["betas"][1] > LARGEST_BFLOAT16_BETA:
        warn_caller(
            f"state_dtype=torch.bfloat16 with betas={group['betas']}: rounding keeps a bfloat16 "
            "second moment from shrinking if the second beta is above 0.996, so steps stay too "
            "small after large gradients. Pass for example betas=(0.9, 0.95)"
        )


def check_unscale(unscale: str, process_group: Any) -> None:
    """Raise for an invalid `unscale`, or for one that the ranks of a group cannot have."""
    if unscale not in ("auto", "in_step", "before"):
        raise ValueError(f'unscale: expected "auto", "in_step" or "before", got {unscale!r}')
    if unscale == "before" and process_group is not None:
        # Each rank would decide by its own gradients whether to call the step.
        raise ValueError('unscale: expected "auto" or "in_step" with a process_group')


def is_number(value: Any) -> bool:
    """Return True if the value is a real number, and not a bool."""
    return type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))


def are_two_numbers(value: Any) -> bool:
    """Return True for two numbers in any sequence, since configuration libraries have their own."""
    if isinstance(value, str | dict | set | Tensor):
        return False
    try:
        return len(value) == 2 and all(map(is_number, value))
    except TypeError:
        return False


def check_limit(max_grad_norm: float | None) -> None:
    """Raise for a limit that is not a number, or that is below 0."""
    if max_grad_norm is not None and not is_number(max_grad_norm):
        # A tensor is refused, too, since a graph would keep its first value forever.
        raise TypeError(
            f"max_grad_norm: expected None or a number, got {type(max_grad_norm).__name__}"
        )
    if max_grad_norm is not None and not max_grad_norm >= 0:
        raise ValueError(f"max_grad_norm: expected None or at least 0, got {max_grad_norm}")


def check_params(group: dict[str, Any], group_index: int, own: dict[str, Any]) -> None:
    """Raise for a group whose parameters cannot have the masters that its option requests."""
    if option(group, "master_weights", own) != "remainder":
        return
    for index, param in enumerate(group["params"]):
        if param.dtype == torch.float16:
            raise ValueError(
                f"master_weights='remainder': parameter {index} of group {group_index} is float16, "
                "and only bfloat16 has a remainder; use master_weights=True in a group of its own"
            )


def fill(groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Add missing options, except those of NEEDED: programs append groups without all options."""
    for group in groups:
        for name in defaults.keys() - NEEDED:
            group.setdefault(name, defaults[name])


def check_groups(groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Complete and check all groups. Call this before each step, since programs change options."""
    fill(groups, defaults)
    for group in groups:
        check_options(group)
