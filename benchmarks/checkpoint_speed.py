"""The time that checkpoints of a model and its AdamW take, of ampfuse and of others.

All write the same tensors under another name, wait until the disk has them, and replace the ones of
the round before. Rounds are interleaved, and medians are printed, with the part that hashing takes.

    python benchmarks/checkpoint_speed.py [--megabytes 400] [--rounds 9] [--folder /tmp]
"""

import os
import shutil
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median

import ampfuse
import ampfuse.checkpoint
import torch
from ampfuse.checkpoint._tensor_file import flush, hash_of_tensor
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

WIDTH = 2048


def main() -> None:
    """Measure, and print a table."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    layers = max(options.megabytes * 10**6 // (3 * 4 * WIDTH**2), 1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = ampfuse.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        report(measured(model, optimizer, folder, options.rounds), tensors_of(model, optimizer))
    finally:
        shutil.rmtree(folder)


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all tensors of the state by name."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for param, state in optimizer.state_dict()["state"].items():
        tensors |= {f"{param}.{name}": value for name, value in state.items()}
    return tensors


def measured(
    model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rounds: int
) -> dict[str, dict[str, float]]:
    """Return the median seconds of each provider."""
    tensors = tensors_of(model, optimizer)
    names = ("a.pt", "a.st", "dcp", "ours", "new")
    pickled, plain, sharded, ours, new = (folder / name for name in names)

    def save_pickled() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, new)
        flush(new)
        new.replace(pickled)

    def save_plain() -> None:
        save_file(tensors, new)
        flush(new)
        new.replace(plain)

    def save_sharded() -> None:
        save_dcp(tensors, checkpoint_id=new, no_dist=True)
        shutil.rmtree(sharded, ignore_errors=True)
        new.rename(sharded)

    def save_ours() -> None:
        ampfuse.checkpoint.save(ours, step=1, keep=1, model=model, optimizer=optimizer)

    def load_pickled() -> None:
        state = torch.load(pickled)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def load_plain() -> None:
        state = load_file(plain)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(state[name])

    def load_sharded() -> None:
        load_dcp(tensors, checkpoint_id=sharded, no_dist=True)

    def load_ours() -> None:
        ampfuse.checkpoint.load(ours, model=model, optimizer=optimizer)

    def hash_all() -> None:
        for tensor in tensors.values():
            hash_of_tensor(tensor)

    providers: dict[str, dict[str, Callable[[], None]]] = {
        "torch.save": {"save": save_pickled, "load": load_pickled},
        "safetensors": {"save": save_plain, "load": load_plain},
        "DCP": {"save": save_sharded, "load": load_sharded},
        "ampfuse": {"save": save_ours, "load": load_ours},
        "ampfuse's hashes": {"save": hash_all, "load": hash_all},
    }
    times: dict[str, dict[str, list[float]]] = {
        name: {way: [] for way in ways} for name, ways in providers.items()
    }
    for _ in range(rounds):
        for way in ("save", "load"):
            for name, ways in providers.items():
                os.sync()
                begin = time.perf_counter()
                ways[way]()
                times[name][way].append(time.perf_counter() - begin)
    return {
        name: {way: median(seconds) for way, seconds in ways.items()}
        for name, ways in times.items()
    }


def report(seconds: dict[str, dict[str, float]], tensors: dict[str, Tensor]) -> None:
    """Print a table."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    table = Table(title=f"{len(tensors)} tensors, {size / 10**6:,.0f} MB, milliseconds")
    for column in ("", "save", "load"):
        table.add_column(column, justify="right" if column else "left")
    for name, ways in seconds.items():
        table.add_row(name, *(f"{1e3 * ways[way]:.0f}" for way in ("save", "load")))
    Console().print(table)
    share = seconds["ampfuse's hashes"]["save"] / seconds["ampfuse"]["save"]
    print(f"hashing takes {share:.1%} of a save")


if __name__ == "__main__":
    main()
