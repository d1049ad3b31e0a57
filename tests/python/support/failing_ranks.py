"""A training on three ranks that goes on from its checkpoint, and ways for rank 1 to fail."""

import itertools
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import ampfuse
import ampfuse.checkpoint
import torch
import torch.distributed as dist
from ampfuse.checkpoint import _save
from ampfuse.optim import _step
from distributed_steps import SCALE, adamw, local, loss_of, model
from processes import SERVER
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS, VICTIM = 3, 1
STEPS, SAVED_EVERY = 6, 2
TIMEOUT = 5.0  # seconds until a collective fails from which a rank is absent
LONGEST = 60.0  # seconds until a test gives up waiting for a process


class Failure(NamedTuple):
    """How and where rank 1 fails, and in which step."""

    how: str  # "killed before", "killed in", "raises before" or "absent from" the call
    where: str  # a name in CALLS
    step: int = 3


# The call in which a rank fails: an object, a name of a function, and which call of it in a step.
CALLS = {
    "backward": (Tensor, "backward", 1),
    "flag": (dist, "all_reduce", 1),
    "norm": (dist, "all_reduce", 2),
    "decision": (dist, "all_reduce", 3),
    "update": (_step, "step_columns", 1),
    "write": (_save, "write_files", 1),
}


@dataclass
class Record:
    """The states of a rank, which it writes at its end."""

    states: dict = field(default_factory=dict)  # by the number of completed steps
    last: Any = None  # the state after an error
    error: str = ""
    failed: float = 0.0  # the time at which rank 1 has failed


class OfThisRank:
    """A model and an optimizer of one rank, whose states a checkpoint stores for each rank."""

    def __init__(self, **parts):
        self.parts = parts

    def state_dict(self):
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


class Training:
    """A bfloat16 model of which each rank has shards, or layers of its own, and a scaler."""

    def __init__(self, kind):
        rank = dist.get_rank()
        is_sharded = kind == "fully_shard"
        self.network = model(seed=0 if is_sharded else rank).bfloat16()
        group = None if is_sharded else dist.group.WORLD
        if is_sharded:
            fully_shard(self.network, mesh=init_device_mesh("cpu", (RANKS,)))
        self.optimizer = adamw(self.network.parameters(), process_group=group)
        self.scaler = ampfuse.GradScaler("cpu", SCALE, growth_interval=2, process_group=group)
        parts = {"model": self.network, "optimizer": self.optimizer}
        self.objects = parts if is_sharded else {"of_rank": OfThisRank(**parts)}
        self.objects |= {"scaler": self.scaler}

    def step(self, number):
        loss = loss_of(self.network, dist.get_rank(), number)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def state(self):
        """Return copies of this rank's parameters and optimizer state, and the scaler's state."""
        params = list(self.network.parameters())
        tensors = [local(param.detach()).clone() for param in params]
        for param in params:
            state = self.optimizer.state.get(param, {})
            tensors += [local(state[name]).clone() for name in sorted(state)]
        return tensors, self.scaler.state_dict()


def prepare(failure, folder):
    """Make rank 1 fail in the coming step. Others wait for it if it is killed in a collective."""
    failed = folder / "failed"

    def fail():
        failed.write_text(str(time.monotonic()))
        if failure.how == "raises before":
            raise ValueError("rank 1 fails")
        if failure.how == "absent from":
            time.sleep(LONGEST)
        os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_kill():
        while not failed.exists():
            time.sleep(0.01)
        time.sleep(0.2)

    if dist.get_rank() == VICTIM:
        way = threading.Timer(0.5, fail).start if failure.how == "killed in" else fail
        before_call(*CALLS[failure.where], way)
    elif failure.how == "killed in":
        before_call(*CALLS[failure.where], wait_for_kill)


def before_call(owner, name, number, action):
    """Call `action` before the call of this number of a function."""
    original, numbers = getattr(owner, name), itertools.count(1)

    def replacement(*args, **kwargs):
        if next(numbers) == number:
            action()
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def program(folder, rank, kind, failure):
    """Train from the last checkpoint in the folder, if there is one, to the last step."""
    record, run = Record(), folder / "run"
    init = f"file://{folder}/init-{'again' if failure is None else 'first'}"
    is_absent = failure is not None and failure.how == "absent from"
    timeout = timedelta(seconds=TIMEOUT if is_absent else LONGEST)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=RANKS, timeout=timeout)
    training = Training(kind)
    is_continued = ampfuse.checkpoint.latest(run) is not None
    start = ampfuse.checkpoint.load(run, **training.objects).step if is_continued else 0
    record.states[start] = training.state()
    try:
        for number in range(start, STEPS):
            if failure is not None and number == failure.step:
                prepare(failure, folder)
            training.step(number)
            record.states[number + 1] = training.state()
            if (number + 1) % SAVED_EVERY == 0:
                ampfuse.checkpoint.save(run, step=number + 1, **training.objects)
    except BaseException as error:
        record.failed = float((folder / "failed").read_text())
        record.error = f"{type(error).__name__}: {error}"
        record.last = training.state()
        raise
    finally:
        torch.save(vars(record), folder / f"rank-{rank}.pt")


class Ended(NamedTuple):
    """The end of a rank's process."""

    exit_code: int | None
    time: float
    record: Record | None  # None if it was killed


def play(folder, kind, failure=None):
    """Run the program on all ranks. A rank that is absent is killed when the others have ended."""
    processes = []
    for rank in range(RANKS):
        (folder / f"rank-{rank}.pt").unlink(missing_ok=True)
        processes.append(SERVER.Process(target=program, args=(folder, rank, kind, failure)))
        processes[-1].start()
    times = {}
    for rank in sorted(range(RANKS), key=lambda rank: rank == VICTIM):  # it is the last one
        if rank == VICTIM and failure is not None and failure.how == "absent from":
            processes[rank].kill()
        processes[rank].join(LONGEST)
        times[rank] = time.monotonic()
    for process in processes:
        process.kill()  # has no effect on those that have ended
        process.join()
    return [
        Ended(process.exitcode, times[rank], record_of(folder / f"rank-{rank}.pt"))
        for rank, process in enumerate(processes)
    ]


def record_of(file):
    return Record(**torch.load(file)) if file.exists() else None
