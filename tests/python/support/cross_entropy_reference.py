"""Cross-entropy and its gradient in float64, and functions that measure errors of results."""

from typing import Any

import ampfuse
import torch
from torch import Tensor
from torch.nn import functional

# Allowed error of a gradient, in ulps. A CPU without fused multiply-add rounds twice where the
# formulae round once.
ULPS = 1.25 if ampfuse.build_info()["cpu_capability"] == "DEFAULT" else 1.0


def exact(
    logits: Tensor,
    target: Tensor,
    upstream: Tensor | float = 1.0,
    *,
    denominator: float | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return loss and gradient for `upstream` in float64, from the same rounded logits."""
    if logits.dim() == 1 and logits.is_cuda:
        # torch's mean of a single ignored row is 0 on a GPU, but NaN on a CPU and for a batch.
        on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
        loss, gradient = exact(
            logits.cpu(),
            target.cpu(),
            upstream.cpu() if isinstance(upstream, Tensor) else upstream,
            denominator=denominator,
            z_loss=z_loss,
            softcap=softcap,
            **on_cpu,
        )
        return loss.to(logits.device), gradient.to(logits.device)
    x = logits.detach().double().requires_grad_()
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    if target.is_floating_point():
        target = target.detach().double()
    elif target.dtype != torch.int64:
        target = target.long()
    if options.get("weight") is not None:
        options["weight"] = options["weight"].double()
    reduction = options.pop("reduction", "mean")
    ignored = torch.zeros(x.shape[:1], dtype=torch.bool, device=x.device)
    if not target.is_floating_point():
        ignored = target == options.get("ignore_index", -100)
    if z_loss or denominator is not None:
        rows = functional.cross_entropy(z, target, reduction="none", **options)
        rows = rows + z_loss * torch.logsumexp(z, 1).square().masked_fill(ignored, 0)
        divisor = denominator
        if divisor is None and reduction == "mean":
            weight = options.get("weight")
            if target.is_floating_point() or weight is None:
                divisor = float((~ignored).sum())
            else:
                divisor = float(weight[target[~ignored]].sum())
        loss = rows if reduction == "none" else rows.sum() / (divisor or 1.0)
    else:
        loss = functional.cross_entropy(z, target, reduction=reduction, **options)
    (grad,) = torch.autograd.grad(loss, x, torch.as_tensor(upstream).to(loss).expand(loss.shape))
    return loss.detach(), grad


def ulp(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return the distance between neighbouring numbers of `dtype` at each element of `x`."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double().abs()).exponent - 1
    return info.eps * torch.exp2(exponent.double()).clamp(min=info.tiny)


def ulps_off(result: Tensor, expected: Tensor) -> float:
    """Return the largest error of the result, in ulps. Non-finite numbers are left out.

    A GPU rounds the exponentials of float32 logits, so 1.6 of its ulps count as one.
    """
    off = (result.detach().double() - expected).abs() / ulp(result.dtype, expected)
    if result.is_cuda and result.dtype == torch.float32:
        off = off / 1.6
    off = off[expected.isfinite()]
    return off.max().item() if off.numel() else 0.0


def relatively_off(result: Tensor, expected: Tensor) -> float:
    """Return the largest relative error. Zeros and non-finite numbers are left out."""
    off = (result.detach().double() - expected).abs() / expected.abs()
    off = off[expected.isfinite() & (expected != 0)]
    return off.max().item() if off.numel() else 0.0
