"""The operator of Adam and AdamW."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ampfuse._arguments import explain
from ampfuse._graphs import bind_operator

_fused_adam = bind_operator(torch.ops.ampfuse.fused_adam.default)
_fused_adam_write_back_grads = bind_operator(torch.ops.ampfuse.fused_adam.write_back_grads)


def fused_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor],
    state_steps: Sequence[Tensor],
    masters: Sequence[Tensor] = (),
    *,
    lr: Tensor,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled_weight_decay: bool,
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
    """Take one step of Adam or AdamW in place, as `torch.optim` does. `ampfuse.Adam` calls this.

    Entries of the lists with the same index have the same shape and device. A step is skipped,
    counters included, if `found_inf` is not 0, or if the inverse of `grad_scale` is not a finite
    float32.

    Args:
        params: Parameters, float16, bfloat16, float32 or float64 in any mixture; written.
        grads: Gradients, float16, bfloat16 or float32 in any mixture, and float64 for float64
            parameters; written only with `write_back_grads`.
        exp_avgs: First moments, float32 or bfloat16, float64 for float64 parameters; written.
        exp_avg_sqs: Second moments, of the same dtypes; written.
        max_exp_avg_sqs: The largest second moments so far, written; empty without `amsgrad`.
        state_steps: Float32 scalars, the numbers of steps, which are incremented.
        masters: Float32 masters, or int16 bits that a bfloat16 lacks; written. May be empty.
        lr: Learning rate, a tensor with one element.
        beta1: Decay rate of the first moments.
        beta2: Decay rate of the second moments.
        weight_decay: Factor of weight decay.
        eps: Number added to the denominator.
        amsgrad: Divide by the largest second moments so far.
        maximize: Ascend instead of descend.
        decoupled_weight_decay: Decay the weights, as AdamW does, instead of adding to the
            gradients.
        write_back_grads: Replace `grads` by the unscaled, clipped gradients.
        grad_scale: Float32 scalar by which gradients are divided, or None.
        found_inf: Float32 scalar that skips the step unless it is 0, or None.
        total_norm: Norm of the gradients before unscaling and clipping; with `max_norm`.
        max_norm: After unscaling, gradients are scaled so that their norm is at most this.
        grad_norm: Receives `total_norm / grad_scale`, even if the step is skipped, or None.
        adopt_params: Elements of a parameter that differ from the rounded float32 master count as
            written by other code, and are copied to the master. A CPU compares all elements; a GPU
            one in 128 and the last one of each chunk of 2048, and the whole chunk if one differs.
        units: Bfloat16, written: the units of moments in 8 bits, one for each 32 elements in the
            order of memory. The list has those of all first moments, then those of the second.
            `exp_avgs` is then int8 and `exp_avg_sqs` uint8. A code `c` of a group with the unit `u`
            stands for `(c*u)**2`, with the sign of `c`. Not with `amsgrad`.
        ema_params: Exponential averages of the parameters (of their masters, if they have any),
            float32 or bfloat16, float64 for float64 parameters; written. May be empty.
        ema_decay: Decay of these averages. The first step sets them to the parameters.
        round_at_random: Round 16-bit parameters without masters up or down at random, in
            proportion, instead of to nearest.
        seed: Determines the random numbers, with step counters and indices of elements. Codes of
            8-bit moments and bfloat16 averages are always rounded at random.
        first_indices: The index of each tensor's first element among all elements of the model. By
            default tensors follow each other, and each begins at a multiple of 4.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A list has another length, a tensor another shape or device, or an option is
            invalid.

    Examples:
        >>> import torch, ampfuse
        >>> param, state = torch.tensor([1.0]), [[torch.zeros(1)], [torch.zeros(1)]]
        >>> options = dict(beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8)
        >>> options |= dict(amsgrad=False, maximize=False, decoupled_weight_decay=True)
        >>> ampfuse.ops.fused_adam(
        ...     [param], [torch.tensor([5.0])], *state, [], [torch.zeros(())],
        ...     lr=torch.tensor(0.25), **options
        ... )
        >>> param
        tensor([0.7500])
    """
    columns = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs,
        "state_steps": state_steps,
        "masters": masters,
    }
    optional_columns = {"units": units, "ema_params": ema_params}
    try:
        (_fused_adam_write_back_grads if write_back_grads else _fused_adam)(
            *columns.values(),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
            decoupled_weight_decay=decoupled_weight_decay,
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
        explain("fused_adam", error, **columns, **optional_columns)
