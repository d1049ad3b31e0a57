"""The operator of SGD."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ampfuse._arguments import explain
from ampfuse._graphs import bind_operator

_fused_sgd = bind_operator(torch.ops.ampfuse.fused_sgd.default)
_fused_sgd_write_back_grads = bind_operator(torch.ops.ampfuse.fused_sgd.write_back_grads)


def fused_sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] = (),
    state_steps: Sequence[Tensor] = (),
    masters: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
    write_back_grads: bool = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    total_norm: Tensor | None = None,
    max_norm: float | None = None,
    grad_norm: Tensor | None = None,
    adopt_params: bool = False,
    units: Sequence[Tensor] = (),
    ema_params: Sequence[Tensor] = (),
    ema_decay: float = 0.0,
    round_at_random: bool = False,
    seed: int = 0,
    first_indices: Sequence[int] = (),
) -> None:
    """Take one step of SGD in place, as `torch.optim` does. `ampfuse.SGD` calls this.

    Entries of the lists with the same index have the same shape and device. A step is skipped,
    counters included, if `found_inf` is not 0, or if the inverse of `grad_scale` is not a finite
    float32.

    Args:
        params: Parameters, float16, bfloat16, float32 or float64 in any mixture; written.
        grads: Gradients, float16, bfloat16 or float32 in any mixture, and float64 for float64
            parameters; written only with `write_back_grads`.
        momentum_buffers: Float32 or bfloat16, float64 for float64 parameters; written. Empty
            without momentum.
        state_steps: Float32 scalars, the numbers of steps, which are incremented. At 0 the step
            starts the momentum: the buffer is not read and takes the gradient. May be empty if
            there is neither momentum, nor an average, nor random rounding.
        masters: Float32 masters, or int16 bits that a bfloat16 lacks; written. May be empty.
        lr: Learning rate, a tensor with one element.
        momentum: Decay rate of the buffers.
        dampening: Gradients enter the buffers multiplied by `1 - dampening`.
        weight_decay: Factor of the parameter that is added to the gradient.
        nesterov: Step by Nesterov's momentum.
        maximize: Ascend instead of descend.
        write_back_grads: Replace `grads` by the unscaled, clipped gradients.
        grad_scale: Float32 scalar by which gradients are divided, or None.
        found_inf: Float32 scalar that skips the step unless it is 0, or None.
        total_norm: Norm of the gradients before unscaling and clipping; with `max_norm`.
        max_norm: After unscaling, gradients are scaled so that their norm is at most this.
        grad_norm: Receives `total_norm / grad_scale`, even if the step is skipped, or None.
        adopt_params: As in `fused_adam`.
        units: Units of momentum buffers in 8 bits, which are then int8, as in `fused_adam`.
        ema_params: As in `fused_adam`.
        ema_decay: As in `fused_adam`.
        round_at_random: As in `fused_adam`.
        seed: As in `fused_adam`.
        first_indices: As in `fused_adam`.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A list has another length, a tensor another shape or device, or an option is
            invalid.

    Examples:
        >>> import torch, ampfuse
        >>> param = torch.tensor([1.0])
        >>> ampfuse.ops.fused_sgd([param], [torch.tensor([5.0])], lr=torch.tensor(0.1))
        >>> param
        tensor([0.5000])
    """
    columns = {
        "params": params,
        "grads": grads,
        "momentum_buffers": momentum_buffers,
        "state_steps": state_steps,
        "masters": masters,
    }
    optional_columns = {"units": units, "ema_params": ema_params}
    try:
        (_fused_sgd_write_back_grads if write_back_grads else _fused_sgd)(
            *columns.values(),
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            grad_scale=grad_scale,
            found_inf=found_inf,
            total_norm=total_norm,
            max_norm=max_norm,
            grad_norm=grad_norm,
            adopt_params=adopt_params,
            **optional_columns,
            ema_decay=ema_decay,
            round_at_random=round_at_random,
            seed=seed,
            first_indices=first_indices,
        )
    except RuntimeError as error:
        explain("fused_sgd", error, **columns, **optional_columns)
