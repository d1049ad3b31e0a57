"""The operator of the loss scale."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ampfuse._arguments import explain
from ampfuse._graphs import bind_operator

_update_scale = bind_operator(torch.ops.ampfuse.update_scale.default)


def update_scale(
    scale: Tensor,
    growth_tracker: Tensor,
    counters: Tensor,
    found_infs: Sequence[Tensor],
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float | None = None,
    max_scale: float | None = None,
    hysteresis: int = 1,
    hysteresis_refill: str = "growth",
    dynamic: bool = True,
    skip_outliers: float | None = None,
    history: Tensor | None = None,
    norm: Tensor | None = None,
    norms: Tensor | None = None,
) -> None:
    """Update a loss scale in place. `ampfuse.GradScaler` calls this.

    With the defaults this is torch's `_amp_update_scale_`, bit by bit, except that the scale also
    grows if the tracker is past the growth interval already.

    Args:
        scale: Float32 scalar, written.
        growth_tracker: Int32 scalar, the number of steps without overflow in a row; written.
        counters: Int64 tensor, written: the hysteresis tracker (if it is above 1, an overflow
            lowers it instead of the scale), the overflows in a row, and the number of updates.
        found_infs: Float32 scalars; the step has overflowed if any of them is not 0.
        growth_factor: Factor by which the scale grows, at least 1.
        backoff_factor: Factor by which the scale backs off, above 0 and at most 1.
        growth_interval: Number of steps in a row without overflow after which the scale grows.
        min_scale: The lower limit of backing off, above 0, or None.
        max_scale: The upper limit of growing, above 0, or None.
        hysteresis: Number of overflows that it takes to lower the scale.
        hysteresis_refill: `"growth"` or `"clean_step"`: what restores `hysteresis`.
        dynamic: False keeps the scale constant.
        skip_outliers: A norm is an outlier if its logarithm is so many standard deviations (each
            at least 0.1) above the mean; a number above 1, or None.
        history: Float32 tensor (n, 3) with a row for each of the last n updates: the scale before
            it, 1 if it has overflowed or 2 if it was skipped as an outlier, and `norm`. Update i is
            written to row i mod n.
        norm: Float32 scalar, the norm of the unscaled gradients, or None.
        norms: Float64 tensor of the number of norms so far, the mean and the variance of their
            logarithms, and the limit above which a norm is an outlier; written. It begins as 0, 0,
            0 and infinity.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A tensor has another size or device, or an option is out of range.

    Examples:
        >>> import torch, ampfuse
        >>> scale, tracker = torch.tensor(8.0), torch.tensor(0, dtype=torch.int32)
        >>> counters, flags = torch.tensor([1, 0, 0]), [torch.tensor(0.0), torch.tensor(1.0)]
        >>> options = dict(growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
        >>> ampfuse.ops.update_scale(scale, tracker, counters, flags, **options)
        >>> scale, counters
        (tensor(4.), tensor([1, 1, 1]))
    """
    try:
        _update_scale(
            scale,
            growth_tracker,
            counters,
            found_infs,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis=hysteresis,
            hysteresis_refill=hysteresis_refill,
            dynamic=dynamic,
            skip_outliers=skip_outliers,
            history=history,
            norm=norm,
            norms=norms,
        )
    except RuntimeError as error:
        explain("update_scale", error, found_infs=found_infs)
