"""A small training program, whose state is saved and loaded."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ampfuse
import ampfuse.checkpoint
import torch
import torch.distributed as dist
from torch import nn

# Options of `Training.of`.
KINDS = {
    "float32": {},
    "torch's AdamW": {"make": torch.optim.AdamW},
    "torch's SGD": {"make": torch.optim.SGD, "momentum": 0.9},
    "SGD with masters": {"make": ampfuse.SGD, "momentum": 0.9, "dtype": torch.bfloat16},
    "amsgrad": {"make": ampfuse.Adam, "amsgrad": True},
    "bfloat16 with masters": {"dtype": torch.bfloat16, "master_weights": True},
    "bfloat16 with remainders": {"dtype": torch.bfloat16, "master_weights": "remainder"},
    "bfloat16 moments": {
        "dtype": torch.bfloat16,
        "master_weights": True,
        "state_dtype": torch.bfloat16,
    },
    "8-bit moments": {
        "dtype": torch.bfloat16,
        "master_weights": "stochastic",
        "state_dtype": "8bit",
        "ema": 0.9,
    },
    "float16 with masters": {"dtype": torch.float16, "master_weights": True},
    "without a scaler": {"enabled": False},
}


@dataclass
class Training:
    """A model with dropout and batch norm, and all that has a state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: Any
    scheduler: Any

    @staticmethod
    def of(seed, dtype=torch.float32, *, make=ampfuse.AdamW, enabled=True, **options):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4)
        ).to(dtype)
        optimizer = make(model.parameters(), lr=0.05, **options)
        scaler = ampfuse.GradScaler("cpu", enabled=enabled, growth_interval=3, history=8)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return Training(model, optimizer, scaler, scheduler)

    @property
    def objects(self):
        return dict(vars(self))

    def backward(self):
        dtype = next(self.model.parameters()).dtype
        output = self.model(torch.randn(16, 8).to(dtype))
        loss = (output.float() - torch.rand(16, 4)).square().mean()
        self.scaler.scale(loss).backward()
        return loss.item()

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def run(self, steps):
        losses = []
        for _ in range(steps):
            losses.append(self.backward())
            self.step()
        return losses

    def tensors(self):
        """Return all tensors of the state."""
        is_ours = type(self.optimizer).__module__.startswith("ampfuse")
        decoded = {"decoded": True} if is_ours else {}
        state = self.optimizer.state_dict(**decoded)["state"].values()
        found = [*self.model.state_dict().values()]
        found += [one for entries in state for one in entries.values()]
        return [one for one in found if isinstance(one, torch.Tensor)]


class Stateful:
    """An object with a state, such as a loader."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def same_within_a_code(one, other):
    """Return True if two lists of tensors are the same, except for a code of 8-bit moments.

    Shards cut groups of 32 codes, so their moments are rounded to other codes.
    """
    assert len(one) == len(other) > 0
    return all(
        same([a], [b]) or ((roots(a) - roots(b)).abs() <= roots(b).abs().max() / 126).all()
        for a, b in zip(one, other, strict=True)
    )


def roots(tensor):
    return tensor.sign() * tensor.abs().sqrt()


def same(one, other):
    """Return True if two lists of tensors are the same, bit for bit."""
    assert len(one) == len(other) > 0
    return all(
        a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))
        for a, b in zip(one, other, strict=True)
    )


def bytes_of(tensor):
    """Return the bytes of a tensor as a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def shared_folder():
    """Return the same new folder on all ranks."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    return Path(folder[0])


def error_of(function):
    """Return the message of a checkpoint's error, or of a refused kind of object."""
    try:
        function()
    except (ampfuse.checkpoint.CheckpointError, TypeError) as error:
        return str(error)
    return ""
