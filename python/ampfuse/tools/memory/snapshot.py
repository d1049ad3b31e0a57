"""Reads the snapshots of `torch.cuda.memory._dump_snapshot`: what was live at the peak."""

import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ampfuse._texts import size_text
from ampfuse.tools.memory.record import BACKWARD, FORWARD, STEP

SHOWN = 12
ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
NATIVE = ("??", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".so")
LIBRARIES = ("torch/", "ampfuse/", "<")


@dataclass(frozen=True)
class Snapshot:
    """The memory of a GPU at the peak of a recorded history, in bytes."""

    peak: int
    reserved: int
    """Memory that torch had reserved at the end of the history."""
    places: dict[tuple[str, str], int]
    """The peak by phase and by the line of the program that allocated it."""

    def __str__(self) -> str:
        """Return a table."""
        lines = [f"peak {size_text(self.peak)}; reserved at the end {size_text(self.reserved)}"]
        largest = sorted(self.places.items(), key=lambda item: -item[1])
        for (phase, place), size in largest[:SHOWN]:
            share = size / self.peak if self.peak else 0
            lines.append(f"  {phase:<16}{place:<40}{size_text(size):>12}{share:>7.0%}")
        rest = sum(size for _, size in largest[SHOWN:])
        if rest:
            lines.append(f"  {len(largest) - SHOWN} other places{size_text(rest):>40}")
        return "\n".join(lines)


def read_snapshot(path: str | Path, device: int = 0) -> Snapshot:
    """Read a snapshot that torch has written. Nothing in the file is executed.

    Record it with `torch.cuda.memory._record_memory_history()`, some steps, and
    `torch.cuda.memory._dump_snapshot("snapshot.pickle")`.

    Args:
        path: The file.
        device: Index of the GPU.

    Returns:
        The memory at the peak, by phase and line of the program.

    Raises:
        ValueError: The pickle contains something else.
        pickle.UnpicklingError: The file contains code, or is not a pickle.
    """
    with Path(path).open("rb") as file:
        try:
            content = _PlainUnpickler(file).load()
        except (EOFError, ValueError) as error:
            raise pickle.UnpicklingError(f"{path} is not a pickle ({error})") from None
    try:
        return _at_peak(content, device)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a snapshot of torch's memory ({error!r})") from None


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts; refuses everything else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"a snapshot contains no code: found {module}.{name}")


def _at_peak(content: dict[str, Any], device: int) -> Snapshot:
    segments = [one for one in content["segments"] if one.get("device", 0) == device]
    traces = content["device_traces"]
    events = [
        event
        for event in (traces[device] if device < len(traces) else [])
        if event["action"] in ("alloc", "free_completed")
    ]
    # Memory from before the history: it is freed in it, or still active at its end.
    live: dict[int, tuple[int, tuple[str, str]]] = {}
    allocated: set[int] = set()
    for event in events:
        if event["action"] == "alloc":
            allocated.add(event["addr"])
        elif event["addr"] in allocated:
            allocated.remove(event["addr"])
        else:
            live[event["addr"]] = (event["size"], ("before", ""))
    for segment in segments:
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] in ACTIVE and address not in allocated:
                live[address] = (block["size"], ("before", ""))
            address += block["size"]
    now = peak = sum(size for size, _ in live.values())
    until = 0  # the peak is after so many events
    for count, event in enumerate(events, 1):
        now += event["size"] if event["action"] == "alloc" else -event["size"]
        if now > peak:
            peak, until = now, count
    for event in events[:until]:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], _place(event.get("frames", [])))
        else:
            del live[event["addr"]]
    places: Counter[tuple[str, str]] = Counter()
    for size, place in live.values():
        places[place] += size
    return Snapshot(peak, sum(one["total_size"] for one in segments), dict(places))


def _place(frames: list[dict[str, Any]]) -> tuple[str, str]:
    """Return phase and line of an allocation, from its stack with the innermost frame first."""
    files = [(frame["filename"].replace("\\", "/"), frame) for frame in frames]
    if not files:
        return "unknown", "no stack was recorded"
    python = [(file, frame) for file, frame in files if not file.endswith(NATIVE)]
    if not python:  # backward runs on threads of its own
        return BACKWARD, "outside Python"
    phase = FORWARD
    for file, frame in python:
        if "torch/autograd/" in file and frame["name"] in ("backward", "_engine_run_backward"):
            phase = BACKWARD
        elif "torch/optim/" in file and "step" in frame["name"]:
            phase = STEP
    own = [(file, frame) for file, frame in python if not _is_library(file)]
    file, frame = (own or python)[0]
    return phase, f"{file.rpartition('/')[2]}:{frame['line']} {frame['name']}"


def _is_library(file: str) -> bool:
    return any(f"/site-packages/{part}" in file or file.startswith(part) for part in LIBRARIES)
