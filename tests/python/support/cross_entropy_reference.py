"""Cross-entropy and its gradient in float64, and functions that measure errors of results."""

import ampfuse
import torch
from torch.nn import functional

# Allowed error of a gradient, in ulps. A CPU without fused multiply-add rounds twice where the
# formulae round once.
ULPS = 1.25 if ampfuse.build_info()["cpu_capability"] == "DEFAULT" else 1.0


def allowed_ulps(logits):
    """Return the allowed error of a gradient of rows of any length; see docs/numerics.md."""
    return 1.6 if logits.is_cuda and logits.dtype == torch.float32 else ULPS


def error_of_probability(logits):
    """Return the allowed relative error of p before it is rounded, which shows where terms cancel.

    On a GPU, the exponent of 16-bit logits carries a bias of 40, so it is rounded by up to 2**-19.
    """
    return 2e-6 if logits.is_cuda and logits.dtype.itemsize == 2 else 4e-7


def exact(logits, target, upstream=1.0, *, denominator=None, z_loss=0.0, softcap=None, **options):
    """Return loss and gradient for `upstream` in float64, from the same rounded logits."""
    if logits.dim() == 1:
        # torch's mean of a single ignored row is 0 on a GPU, but NaN on a CPU and for a batch.
        options |= {"denominator": denominator, "z_loss": z_loss, "softcap": softcap}
        loss, gradient = exact(logits[None], target[None], upstream, **options)
        return loss.reshape(()), gradient[0]
    x = logits.detach().double().requires_grad_()
    z = x if softcap is None else softcap * torch.tanh(x / softcap)
    are_indices = not target.is_floating_point()
    target = target.long() if are_indices else target.detach().double()
    weight = options.pop("weight", None)
    weight = z.new_ones(z.shape[1]) if weight is None else weight.double()
    reduction = options.pop("reduction", "mean")
    loss = functional.cross_entropy(z, target, weight, reduction="none", **options)
    counted = torch.ones_like(loss, dtype=torch.bool)
    if are_indices:
        counted = target != options.get("ignore_index", -100)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(z, 1).square().masked_fill(~counted, 0)
    if reduction == "mean" and denominator is None:
        denominator = weight[target[counted]].sum() if are_indices else loss.numel()
    if reduction != "none":
        loss = loss.sum() / (1 if reduction == "sum" else denominator)
    (grad,) = torch.autograd.grad(loss, x, torch.as_tensor(upstream).to(loss).expand(loss.shape))
    return loss.detach(), grad


def results(function, logits, target, upstream=1.0, **options):
    """Return the loss that `function` computes, and its gradient for `upstream`."""
    loss = function(logits, target, **options)
    upstream = torch.as_tensor(upstream).to(loss).expand(loss.shape)
    return loss.detach(), *torch.autograd.grad(loss, logits, upstream)


def scaled(logits, target, upstream=1.0, **options):
    """Return loss and gradient of cross_entropy, which gets `upstream` as grad_scale if it may.

    The gradient is then rounded once. A loss of each row needs no grad_scale.
    """
    if options.get("reduction") != "none":
        options["grad_scale"] = torch.as_tensor(upstream, device=logits.device)
    return results(ampfuse.cross_entropy, logits, target, upstream, **options)


def assert_exact(found, expected, case=""):
    """Check loss and gradient; `case` is named if they are wrong."""
    if found[1].dtype == torch.float64:  # the reference has as many digits
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
        return
    off = relatively_off(found[0], expected[0])
    assert off <= 1e-6, f"{case}: the relative error of the loss is {off}"
    off = ulps_off(found[1], expected[1])
    assert off <= ULPS, f"{case}: the gradient is off by {off} ulps"


def ulp(dtype, x):
    """Return the distance between neighbouring numbers of `dtype` at each element of `x`."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.double().abs()).exponent - 1
    return info.eps * torch.exp2(exponent.double()).clamp(min=info.tiny)


def ulps_off(result, expected):
    """Return the largest error of the result, in ulps. Non-finite numbers are left out.

    A GPU rounds the exponentials of float32 logits, so 1.6 of its ulps count as one.
    """
    off = (result.detach().double() - expected).abs() / ulp(result.dtype, expected)
    if result.is_cuda and result.dtype == torch.float32:
        off = off / 1.6
    off = off[expected.isfinite()]
    return off.max().item() if off.numel() else 0.0


def relatively_off(result, expected):
    """Return the largest relative error. Zeros and non-finite numbers are left out."""
    off = (result.detach().double() - expected).abs() / expected.abs()
    off = off[expected.isfinite() & (expected != 0)]
    return off.max().item() if off.numel() else 0.0
