"""Trains a model with one strategy, and measures the memory of each rank.

`memory_per_rank.py` starts this by torchrun.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from run_log import end_rank, start_rank
from strategies import STRATEGIES, OneProcess, local
from torch import Tensor
from transformer import batch


def reset_peak(device: torch.device) -> None:
    """Make the present memory the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM starts again from VmRSS


def peak(device: torch.device) -> int:
    """Return the peak memory in bytes: of torch's tensors on a GPU, of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def train(strategy: OneProcess, steps: int) -> tuple[list[Tensor], list[float]]:
    """Return the losses of the steps, and their seconds."""
    losses, seconds = [], []
    for step in range(steps):
        words, targets = (part.to(strategy.device) for part in batch(step))
        start = time.perf_counter()
        losses.append(strategy.step(words, targets))
        if strategy.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def total_bytes(tensors: Iterable[Any], device: torch.device) -> int:
    """Return the bytes of this rank's parts of tensors, as far as they are on the device."""
    parts = [local(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
    return sum(part.nbytes for part in parts if part.device.type == device.type)


def bytes_held(strategy: OneProcess) -> dict[str, int]:
    """Return the bytes of parameters, gradients and optimizer state after a step."""
    params = list(strategy.model.parameters())
    optimizer = getattr(strategy.optimizer, "optim", strategy.optimizer)  # inside ZeRO
    states = [value for state in optimizer.state.values() for value in state.values()]
    grads = [param.grad for param in params]
    kinds: dict[str, list[Any]] = {"weights": params, "gradients": grads, "state": states}
    return {kind: total_bytes(tensors, strategy.device) for kind, tensors in kinds.items()}


def main() -> None:
    """Train twice, first a tiny model, and write what the ranks measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("layers", type=int)
    parser.add_argument("width", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("weights", choices=["float32", "bfloat16"])
    parser.add_argument("result", type=Path)
    options = parser.parse_args()
    device, weights = start_rank(), getattr(torch, options.weights)
    make = STRATEGIES[options.strategy]

    # Modules and buffers that torch loads in the first steps and keeps are not counted.
    train(make(options.layers, 32, weights, device), steps=2)
    reset_peak(device)
    before = peak(device)
    strategy = make(options.layers, options.width, weights, device)
    losses, seconds = train(strategy, options.steps)
    measured = bytes_held(strategy) | {
        "peak": peak(device) - before,
        "seconds": statistics.median(seconds[1:]),
    }

    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, measured)
    summed = torch.stack(losses).float()
    dist.all_reduce(summed)
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps({"ranks": ranks, "losses": summed.tolist()}))
    end_rank()


if __name__ == "__main__":
    main()
