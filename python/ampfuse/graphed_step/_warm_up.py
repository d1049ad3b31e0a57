"""Warm-up steps that change nothing, except that they create the optimizer's state.

They make libraries do the work of a first call. The optimizer's steps are skipped, so neither
parameters nor the optimizer's state need to be copied.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ampfuse.amp import GradScaler
from ampfuse.optim import Adam


@contextmanager
def warm_up(
    modules: list[nn.Module], optimizer: Adam, scaler: GradScaler, device: torch.device
) -> Iterator[None]:
    """Undo what training steps in this block change, but keep optimizer state that they create.

    Gradients, buffers, random number generators and the scaler are restored, even if a step raises.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(_restored_scaler(scaler, device))
        stack.enter_context(_restored_norm(optimizer))
        for module in modules:
            stack.enter_context(_restored_gradients(module))
            stack.enter_context(_restored_buffers(module))
        yield


@contextmanager
def _restored_scaler(scaler: GradScaler, device: torch.device) -> Iterator[None]:
    if not scaler.is_enabled():
        yield
        return
    scaler.scale(torch.ones((), device=device))  # creates the scale there
    before, limit = scaler.snapshot(), scaler.max_consecutive_skips
    scaler.max_consecutive_skips = None
    try:
        yield
    finally:
        scaler.max_consecutive_skips = limit
        scaler.restore(before)


@contextmanager
def _restored_norm(optimizer: Adam) -> Iterator[None]:
    """Restore the norm of the last step, and delete the flag by which steps were skipped."""
    before = optimizer.grad_norm
    try:
        yield
    finally:
        vars(optimizer).pop("found_inf", None)
        optimizer.grad_norm = before


@contextmanager
def _restored_gradients(model: nn.Module) -> Iterator[None]:
    """Restore the gradients of all parameters of the model, with or without an optimizer."""
    grads = [(param, param.grad) for param in model.parameters()]
    for param, _ in grads:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in grads:
            param.grad = grad


@contextmanager
def _restored_buffers(model: nn.Module) -> Iterator[None]:
    buffers = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in buffers.items()}
    try:
        yield
    finally:
        now = dict(model.named_buffers())
        replaced = [name for name in buffers if now.get(name) is not buffers[name]]
        with torch.no_grad():
            for name, buffer in buffers.items():
                buffer.copy_(values[name])
                _put_buffer(model, name, buffer)
    if replaced:
        raise RuntimeError(
            f"{', '.join(replaced)}: forward() replaces this buffer, which a CUDA graph cannot "
            "follow; update it in place, e.g. with copy_()"
        )


def _put_buffer(model: nn.Module, name: str, buffer: Tensor) -> None:
    path, _, attribute = name.rpartition(".")
    model.get_submodule(path)._buffers[attribute] = buffer
