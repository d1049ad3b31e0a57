"""Warm-up steps that change nothing, except that they create the optimizer's state.

They make libraries do the work of a first call. The optimizer's steps are skipped, so neither
parameters nor the optimizer's state need to be copied.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ampfuse.amp import GradScaler
from ampfuse.optim import FusedOptimizer


@contextmanager
def warm_up(
    roots: list[nn.Module], optimizer: FusedOptimizer, scaler: GradScaler, device: torch.device
) -> Iterator[None]:
    """Undo what training steps in this block change, but keep optimizer state that they create.

    Gradients, buffers, random number generators and the scaler are restored, even if a step raises.
    """
    grads = [(param, param.grad) for root in roots for param in root.parameters()]
    buffers = [
        (owner._buffers, name, f"{path}.{name}".lstrip("."), buffer, buffer.clone())
        for root in roots
        for path, owner in root.named_modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    norm = optimizer.grad_norm
    if scaler.is_enabled():
        scaler.scale(torch.ones((), device=device))  # creates the scale there
    before, limit = scaler.snapshot(), scaler.max_consecutive_skips
    scaler.max_consecutive_skips = None
    for param, _ in grads:
        param.grad = None
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        scaler.max_consecutive_skips = limit
        scaler.restore(before)
        vars(optimizer).pop("found_inf", None)  # the flag by which steps were skipped
        optimizer.grad_norm = norm
        for param, grad in grads:
            param.grad = grad
        replaced = [path for now, name, path, buffer, _ in buffers if now.get(name) is not buffer]
        with torch.no_grad():
            for now, name, _, buffer, value in buffers:
                now[name] = buffer.copy_(value)
    if replaced:
        raise RuntimeError(
            f"{', '.join(replaced)}: forward() replaces this buffer, which a CUDA graph cannot "
            "follow; update it in place, e.g. with copy_()"
        )
