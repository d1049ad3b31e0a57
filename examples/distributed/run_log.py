"""Starts the ranks of a program, and prints and writes what they did."""

import argparse
import hashlib
import json
import math
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import ampfuse
import torch
import torch.distributed as dist
from torch import Tensor

EVERY = 20  # steps between two lines


def arguments(description: str | None) -> argparse.Namespace:
    """Parse the options of both programs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--result", type=Path, help="where the figures go, as JSON")
    return parser.parse_args()


def start_rank() -> torch.device:
    """Join the ranks that torchrun has started, and return the device of this one."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()  # NCCL for tensors on GPUs, gloo for others
    return device


def end_rank() -> NoReturn:
    """Leave the group and end the process.

    Threads of gloo release tensors, for which they take Python's lock. If Python is ending by then,
    they abort the process, although all is done. So Python does not end, the process does.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


class RunLog:
    """The losses and norms of a run. The host waits for them only when a line is due."""

    def __init__(self, scaler: ampfuse.GradScaler, optimizer: ampfuse.AdamW) -> None:
        self._scaler, self._optimizer = scaler, optimizer
        self._unread: list[tuple[Tensor, Tensor]] = []
        self._losses: list[float] = []
        self._norms: list[float] = []

    def ended_step(self, loss: Tensor) -> None:
        """Record a step, whose loss is the sum of what the ranks pass."""
        norm = self._optimizer.grad_norm
        assert norm is not None
        self._unread.append((loss.detach(), norm))
        if len(self._unread) < EVERY:
            return
        self._read()
        if dist.get_rank() == 0:
            skipped = sum(record.skipped for record in self._scaler.history())
            print(
                f"step {len(self._losses):4}   loss {self._losses[-1]:.4f}   "
                f"scale {self._scaler.get_scale():9,.0f}   norm {self._norms[-1]:.3f}   "
                f"skipped {skipped}",
                flush=True,
            )

    def write(self, path: Path, weights: dict[str, Tensor]) -> None:
        """Write losses, weights, and what each rank did. All ranks call this.

        Rank 0 collects all weights: checkpoints of large models need ampfuse.checkpoint.
        """
        self._read()
        records = self._scaler.history()
        did = {
            "scales": [record.scale for record in records],
            "skipped": [record.skipped for record in records],
            "norms": [norm if math.isfinite(norm) else None for norm in self._norms],
            "hashes": {
                name: hashlib.sha256(weight.detach().cpu().numpy().tobytes()).hexdigest()
                for name, weight in weights.items()
            },
        }
        lists = {name: weight.flatten().tolist() for name, weight in weights.items()}
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (did, lists))
        if dist.get_rank() == 0:
            result = {
                "losses": self._losses,
                "ranks": [did for did, _ in ranks],
                "weights": {name: part[name] for _, part in ranks for name in part},
            }
            path.write_text(json.dumps(result))

    def _read(self) -> None:
        """Read the steps that are not read yet, on all ranks."""
        if self._unread:
            losses, norms = (torch.stack(each) for each in zip(*self._unread, strict=True))
            dist.all_reduce(losses)
            self._losses += losses.tolist()
            self._norms += norms.tolist()
            self._unread.clear()
