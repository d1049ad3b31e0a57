"""The options of parameter groups, and their checks."""

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ampfuse._arguments import described, is_flag, suggestion
from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse._warning import warn_caller
from ampfuse.optim import _coded
from ampfuse.optim._rule import Rule

# Groups hold the dtype's name: tools that gather checkpoints from ranks do not support dtypes.
MOMENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

MASTER_KINDS = ("auto", "remainder", "stochastic")

# Options that choose one of torch's implementations, with torch's defaults. Only the groups of
# torch's optimizers have them.
TORCHS_OWN = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}

_ALWAYS_FUSED = "the step is always fused: drop foreach, fused, capturable and differentiable"
REMEDIES = dict.fromkeys(TORCHS_OWN, _ALWAYS_FUSED)  # hints for arguments that torch's class has
REMEDIES |= {"state_dtype": "write momentum_dtype", "momentum_dtype": "write state_dtype"}
REMEDIES |= {"ema_decay": "write ema"}


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


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return `"float32"` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def plain(rule: Rule, options: dict[str, Any]) -> dict[str, Any]:
    """Convert options in place to Python's own types, since others cannot be saved and loaded."""
    rule.plain(options)
    for name in (*rule.flags, "write_back_grads"):
        if name in options and is_flag(options[name]):
            options[name] = bool(options[name])
    return options


def refuse_other_dtype(rule: Rule, group: dict[str, Any]) -> None:
    """Raise for the name that the dtype of moments has in another optimizer."""
    for name in {"momentum_dtype", "state_dtype"} - {rule.moment_dtype}:
        if name in group:
            raise TypeError(f"{rule.name}: {name}: expected {rule.moment_dtype}, its name here")


def warn_of_misspelled(rule: Rule, group: dict[str, Any]) -> None:
    """Warn of a key of a group that looks like a misspelled option.

    Programs and schedulers keep keys of their own in groups, such as `initial_lr`,
    `max_weight_decay` or `name`.
    """
    if has_torchs(group):  # patched programs stay as they are
        return
    known = {"lr", *rule.needed_options, *rule.numbers, *rule.flags, *rule.ours}
    for key in group.keys() - known:
        # A key that has an option's name in it is one of a program that schedules this option.
        others = [name for name in known if f"_{name}_" not in f"_{key}_"]
        likeness = 0.6 if key == "max_norm" else 0.85  # torch's name in clipping functions
        if hint := suggestion(str(key), others, likeness):
            warn_caller(f"{rule.name}: {key} is no option of a group{hint}")


def check_initial(rule: Rule, options: dict[str, Any]) -> None:
    """Raise for invalid initial options, with torch's message if torch raises too."""
    warn_of_misspelled(rule, options)
    check_options(rule, options)
    lr = options["lr"]
    # A learning rate on a GPU is not checked: the host would wait for it.
    if not (isinstance(lr, Tensor) and lr.device.type != "cpu") and not lr >= 0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not options["weight_decay"] >= 0:
        raise ValueError(f"Invalid weight_decay value: {options['weight_decay']}")


def warn_of_float32_weights(master_weights: bool | str, groups: list[dict[str, Any]]) -> None:
    """Warn of an option that does nothing, since it is about 16-bit weights."""
    dtypes = {param.dtype for group in groups for param in group["params"]}
    if master_weights in ("remainder", "stochastic") and dtypes.isdisjoint(DTYPES_16_BIT):
        warn_caller(
            f"master_weights={master_weights!r} has no effect, since no parameter is 16-bit: call "
            "model.to(torch.bfloat16) before the optimizer is made, and train without autocast"
        )


def check_options(rule: Rule, options: dict[str, Any]) -> None:
    """Raise for options that no step can use.

    Schedules may set learning rates and weight decay below 0, as in torch.
    """
    lr = options["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1 or lr.is_complex():
            raise ValueError("Tensor lr must be 1-element")
    elif not is_number(lr):
        raise TypeError(f"lr: expected a number or a tensor, got {described(lr)}")
    elif lr != lr:  # NaN; isnan refuses very large ints
        raise ValueError(f"Invalid learning rate: {lr}")
    for name in rule.numbers:
        if not is_number(options[name]):
            raise TypeError(f"{name}: expected a number, got {described(options[name])}")
    for name in rule.flags:
        if not is_flag(options[name]):
            raise TypeError(f"{name}: expected a bool, got {described(options[name])}")
    rule.check(options)
    if options["weight_decay"] != options["weight_decay"]:
        raise ValueError(f"Invalid weight_decay value: {options['weight_decay']}")
    check_ours(rule, options)


def check_ours(rule: Rule, options: dict[str, Any]) -> None:
    """Raise for invalid values of the options that torch does not have."""
    ours = rule.ours
    master_weights = option(options, "master_weights", ours)
    if not isinstance(master_weights, bool) and master_weights not in MASTER_KINDS:
        raise ValueError(
            'master_weights: expected "auto", True, False, "remainder" or "stochastic", got '
            f"{master_weights!r}"
        )
    if not is_flag(option(options, "write_back_grads", ours)):
        raise TypeError(
            f"write_back_grads: expected a bool, got {described(options['write_back_grads'])}"
        )
    dtype = option(options, rule.moment_dtype, ours)
    if dtype is not None and dtype_name(dtype) not in (*MOMENT_DTYPES, _coded.NAME):
        raise ValueError(
            f'{rule.moment_dtype}: expected torch.float32, torch.bfloat16 or "8bit", got {dtype}'
        )
    check_ema(option(options, "ema", ours), option(options, "ema_dtype", ours))
    seed = option(options, "seed", ours)
    if type(seed) is not int:
        raise TypeError(f"seed: expected an int, got {described(seed)}")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: expected an int of 64 bits, got {seed}")
    check_limit(option(options, "max_grad_norm", ours))


def check_ema(ema: Any, dtype: Any) -> None:
    """Raise for an invalid decay or dtype of averages."""
    if dtype is not None and dtype_name(dtype) not in MOMENT_DTYPES:
        raise ValueError(f"ema_dtype: expected torch.float32 or torch.bfloat16, got {dtype}")
    if ema is None:
        return
    if not is_number(ema):
        raise TypeError(f"ema: expected None or a number, got {described(ema)}")
    if not 0 <= ema < 1:
        raise ValueError(f"ema: expected a decay from 0 to less than 1, got {ema}")


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


def check_limit(max_grad_norm: float | None) -> None:
    """Raise for a limit that is not a number, or that is below 0."""
    if max_grad_norm is not None and not is_number(max_grad_norm):
        # A tensor is refused, too, since a graph would keep its first value forever.
        raise TypeError(
            f"max_grad_norm: expected None or a number, got {type(max_grad_norm).__name__}"
        )
    if max_grad_norm is not None and not max_grad_norm >= 0:
        raise ValueError(f"max_grad_norm: expected None or at least 0, got {max_grad_norm}")


def check_params(rule: Rule, group: dict[str, Any], group_index: int, own: dict[str, Any]) -> None:
    """Raise for a group whose parameters cannot have the state that its options request."""
    if rule.state_options(group, own).is_coded:
        check_coded(rule, group, group_index)
    if option(group, "master_weights", own) != "remainder":
        return
    for index, param in enumerate(group["params"]):
        if param.dtype == torch.float16:
            raise ValueError(
                f"master_weights='remainder': parameter {index} of group {group_index} is float16, "
                "and only bfloat16 has a remainder; use master_weights=True in a group of its own"
            )


def check_coded(rule: Rule, group: dict[str, Any], group_index: int) -> None:
    """Raise for a group whose moments cannot be in 8 bits."""
    if len(rule.moments_of(group)) > 2:
        raise ValueError(
            f'{rule.moment_dtype}="8bit": group {group_index} has amsgrad, whose third moment has '
            "no 8-bit form; use torch.bfloat16"
        )
    for index, param in enumerate(group["params"]):
        if param.dtype not in (*DTYPES_16_BIT, torch.float32):
            raise ValueError(
                f'{rule.moment_dtype}="8bit": parameter {index} of group {group_index} is '
                f"{param.dtype}, and only float16, bfloat16 and float32 parameters have 8-bit "
                "moments; use torch.float32 in a group of its own"
            )


def fill(rule: Rule, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Add missing options that are not needed: programs append groups without all options."""
    for group in groups:
        for name in defaults.keys() - {*rule.needed_options}:
            group.setdefault(name, defaults[name])


def check_groups(rule: Rule, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
    """Complete and check all groups. Call this before each step, since programs change options."""
    fill(rule, groups, defaults)
    for group in groups:
        check_options(rule, group)
