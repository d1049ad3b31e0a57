"""Adam like torch's, as a `FusedOptimizer`."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse import ops
from ampfuse._arguments import described, refuse_unknown
from ampfuse._warning import warn_caller
from ampfuse.optim import options
from ampfuse.optim._rule import Rule
from ampfuse.optim.fused import FusedOptimizer

LARGEST_BFLOAT16_BETA = 1 - 2**-8  # the largest second beta for moments in bfloat16


def _op_options(group: dict[str, Any]) -> dict[str, Any]:
    beta1, beta2 = group["betas"]
    return {
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "amsgrad": bool(group["amsgrad"]),
        "maximize": bool(group["maximize"]),
        "decoupled_weight_decay": bool(group["decoupled_weight_decay"]),
    }


def _moments_of(group: dict[str, Any]) -> tuple[str, ...]:
    return ADAM.moments if group["amsgrad"] else ADAM.moments[:2]


def _check(group: dict[str, Any]) -> None:
    betas = group["betas"]
    if not are_two_numbers(betas):
        if isinstance(betas, list | tuple) and any(isinstance(beta, Tensor) for beta in betas):
            raise ValueError("betas: expected two floats, got a Tensor")
        raise TypeError(f"betas: expected two numbers, got {described(betas)}")
    for index in (0, 1):
        if not 0.0 <= betas[index] < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {betas[index]}")
    if not group["eps"] >= 0:
        raise ValueError(f"Invalid epsilon value: {group['eps']}")


def are_two_numbers(value: Any) -> bool:
    """Return True for two numbers in any sequence, since configuration libraries have their own."""
    if isinstance(value, str | dict | set | Tensor):
        return False
    try:
        return len(value) == 2 and all(map(options.is_number, value))
    except TypeError:
        return False


def _plain_betas(group: dict[str, Any]) -> None:
    betas = group["betas"]
    if not isinstance(betas, list | tuple) and are_two_numbers(betas):
        group["betas"] = tuple(float(beta) for beta in betas)


def _warn_of_slow_decay(group: dict[str, Any], own: dict[str, Any]) -> None:
    """Warn of a second moment in bfloat16 that can grow but not shrink.

    Multiplied by a beta above 1 - 2**-8, a number may lose less than half of bfloat16's last bit,
    and is rounded to what it was.
    """
    is_bfloat16 = options.option(group, "state_dtype", own) in ("bfloat16", torch.bfloat16)
    if is_bfloat16 and group["betas"][1] > LARGEST_BFLOAT16_BETA:
        warn_caller(
            f"state_dtype=torch.bfloat16 with betas={group['betas']}: rounding keeps a bfloat16 "
            "second moment from shrinking if the second beta is above 0.996, so steps stay too "
            "small after large gradients. Pass for example betas=(0.9, 0.95)"
        )


ADAM = Rule(
    name="Adam",
    op=ops.fused_adam,
    op_options=_op_options,
    moments=("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    moments_of=_moments_of,
    moment_dtype="state_dtype",
    numbers=("eps", "weight_decay"),
    flags=("amsgrad", "maximize", "decoupled_weight_decay"),
    needed_options=("lr", "betas", "eps", "weight_decay"),
    needed_state=("step", "exp_avg", "exp_avg_sq"),
    check=_check,
    sparse_error=(
        "Adam does not support sparse gradients, please consider SparseAdam instead. The parameter "
        "has shape"
    ),
    plain=_plain_betas,
    warn=_warn_of_slow_decay,
)


class Adam(FusedOptimizer, torch.optim.Adam):
    """`torch.optim.Adam` with master weights, clipping and unscaling inside the step.

    This is `AdamW`, whose documentation describes the step, except that weight decay is added to
    the gradient. The other arguments are those of `AdamW`.

    Args:
        weight_decay: Factor of weight decay. It is added to the gradient (L2 penalty), unless
            decoupled.
        decoupled_weight_decay: Decay the weights themselves, as `AdamW` does.

    Examples:
        >>> import torch, ampfuse
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = ampfuse.Adam(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[model.bias]["master_param"].dtype
        torch.float32
    """

    _rule = ADAM
    _own_options = ADAM.ours

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        decoupled_weight_decay: bool = False,
        master_weights: bool | str = "auto",
        state_dtype: torch.dtype | str = torch.float32,
        max_grad_norm: float | None = None,
        write_back_grads: bool = False,
        ema: float | None = None,
        ema_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        unscale: str = "auto",
        process_group: Any = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown(type(self).__init__, unknown, options.REMEDIES)
        FusedOptimizer.__init__(
            self,
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
            {
                "master_weights": master_weights,
                "state_dtype": state_dtype,
                "write_back_grads": write_back_grads,
                "ema": ema,
                "ema_dtype": ema_dtype,
                "seed": seed,
            },
            max_grad_norm=max_grad_norm,
            unscale=unscale,
            process_group=process_group,
        )
