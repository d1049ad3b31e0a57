"""SGD like torch's, as a `FusedOptimizer`."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse import ops
from ampfuse._arguments import refuse_unknown
from ampfuse.optim import options
from ampfuse.optim._rule import Rule
from ampfuse.optim.fused import FusedOptimizer


def _op_options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        "momentum": group["momentum"],
        "dampening": group["dampening"],
        "weight_decay": group["weight_decay"],
        # A group without momentum may have the flag, as in torch.
        "nesterov": bool(group["nesterov"]) if group["momentum"] != 0 else False,
        "maximize": bool(group["maximize"]),
    }


def _moments_of(group: dict[str, Any]) -> tuple[str, ...]:
    return SGD_RULE.moments if group["momentum"] != 0 else ()


def _check(group: dict[str, Any]) -> None:
    if not group["momentum"] >= 0:
        raise ValueError(f"Invalid momentum value: {group['momentum']}")
    if group["dampening"] != group["dampening"]:
        raise ValueError("dampening: expected a number, got NaN")


SGD_RULE = Rule(
    name="SGD",
    op=ops.fused_sgd,
    op_options=_op_options,
    moments=("momentum_buffer",),
    moments_of=_moments_of,
    moment_dtype="momentum_dtype",
    numbers=("momentum", "dampening", "weight_decay"),
    flags=("nesterov", "maximize"),
    needed_options=("lr", "momentum", "dampening", "weight_decay"),
    needed_state=(),
    check=_check,
    sparse_error=(
        "SGD does not support sparse gradients; use torch.optim.SGD for parameters that have them. "
        "The parameter has shape"
    ),
    first_step_sets_moments=True,
)


class SGD(FusedOptimizer, torch.optim.SGD):
    """`torch.optim.SGD` with master weights, clipping and unscaling inside the step.

    The documentation of `AdamW` describes the step, masters and loss scaling. The other arguments
    are those of `AdamW`. float32 and float64 parameters get the bits of torch's for-loop SGD on a
    CPU.

    Momentum starts with the first step that is taken: the buffer becomes the gradient, as in torch.
    The state counts these steps (`step`), so a step that is skipped after an overflow starts
    nothing. float32 parameters without momentum have no state.

    State dicts go to torch's SGD and back. A buffer that no step has set is left out, for which the
    host reads the counters.

    Args:
        momentum: Factor by which the buffer decays. Schedulers may change it.
        dampening: The gradient is added to the buffer with the factor `1 - dampening`, except in
            the first step.
        weight_decay: Factor of weight decay, which is added to the gradient (L2 penalty).
        nesterov: Step by the gradient plus `momentum` times the new buffer.
        momentum_dtype: Dtype of the momentum buffers, float32 or bfloat16.

    Raises:
        TypeError: An argument has a wrong type, or is one of torch's that choose an implementation
            (`foreach`, `fused`, `differentiable`), which do not exist here.
        ValueError: An argument is out of range.

    Examples:
        >>> import torch, ampfuse
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = ampfuse.SGD(model.parameters(), lr=0.1, momentum=0.9, max_grad_norm=1.0)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> sorted(optimizer.state[model.bias])
        ['master_param', 'momentum_buffer', 'step']
    """

    _rule = SGD_RULE

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool | str = "auto",
        momentum_dtype: torch.dtype | str = torch.float32,
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
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
            },
            {
                "master_weights": master_weights,
                "momentum_dtype": momentum_dtype,
                "write_back_grads": write_back_grads,
                "ema": ema,
                "ema_dtype": ema_dtype,
                "seed": seed,
            },
            max_grad_norm=max_grad_norm,
            unscale=unscale,
            process_group=process_group,
        )
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
