"""A training whose gradients are read once or twice, and the count of their reads."""

import ampfuse
import pytest
import torch
from ampfuse.distributed import norms_in_backward
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

CPU = torch.device("cpu")


def local(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class GradientReads(TorchDispatchMode):
    """Counts the bytes of gradients that our operators take."""

    def __init__(self, params):
        super().__init__()
        grads = [local(param.grad) for param in params if param.grad is not None]
        self._addresses = {grad.data_ptr() for grad in grads if grad.numel()}
        self.size, self.read = sum(grad.nbytes for grad in grads), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "ampfuse":
            for tensor in tree_iter((args, kwargs or {})):
                if isinstance(tensor, torch.Tensor) and tensor.data_ptr() in self._addresses:
                    self.read += tensor.nbytes
        return function(*args, **(kwargs or {}))


class Model(nn.Module):
    """Layers of odd sizes, of which one is used only in some passes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.sometimes = nn.Linear(7, 30), nn.Linear(30, 30)
        self.last = nn.Linear(30, 3)

    def forward(self, inputs, skips=False):
        hidden = self.first(inputs).relu()
        return self.last(hidden if skips else self.sometimes(hidden))


def train(
    with_norms,
    *,
    wrap=lambda model: model,
    scaled=True,
    passes=1,
    skips=False,
    hook=None,
    between=None,
    device=CPU,
):
    """Take three steps, the second with an overflow; return what happened, and reads per step."""
    model = wrap(Model().to(device))
    optimizer = ampfuse.AdamW(model.parameters(), lr=0.05, max_grad_norm=0.5)
    scaler = ampfuse.GradScaler(device.type, init_scale=256.0, enabled=scaled, history=3)
    handle = norms_in_backward(model, optimizer, hook) if with_norms else None
    if hook is not None and not with_norms:
        model.register_comm_hook(*hook)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    norms, reads = [], []
    for step in range(3):
        for number in range(passes):
            inputs = torch.linspace(-1, 2, 28, device=device).reshape(4, 7)
            inputs *= 1 + rank + step + number
            loss = model(inputs, skips).square().mean()
            overflows = scaled and step == 1 and rank == 0
            scaler.scale(loss * float("inf") if overflows else loss).backward()
        if between is not None:
            between(model)
        with GradientReads(model.parameters()) as counted:
            scaler.step(optimizer)
        scaler.update()
        norms.append(optimizer.grad_norm.item())
        reads.append(counted.read / counted.size)
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    params = [local(param.detach()).clone() for param in model.parameters()]
    skipped = [record.skipped for record in scaler.history()]
    return {"params": params, "norms": norms, "reads": reads, "skipped": skipped}


def assert_same(found, expected):
    assert found["skipped"] == expected["skipped"]
    assert found["norms"] == pytest.approx(expected["norms"], rel=2**-23, nan_ok=True)
    for mine, other in zip(found["params"], expected["params"], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
