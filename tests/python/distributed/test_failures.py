"""A rank fails in a step: the others raise in time, and the training goes on from its checkpoint.

No rank is left with half a step: parameters, moments, masters, step counts and scale are those
before the step, or those after it if all collectives of the step had succeeded.
"""

import re
import signal
import subprocess
import sys

import pytest
from failing_ranks import RANKS, SAVED_EVERY, STEPS, TIMEOUT, VICTIM, Failure, play
from optim_models import assert_same_bits

pytestmark = pytest.mark.slow

KINDS = ("fully_shard", "process_group")
FAILURES = {
    "killed before the backward pass": Failure("killed before", "backward"),
    "killed before overflows are reduced": Failure("killed before", "flag"),
    "killed before the norm is reduced": Failure("killed before", "norm"),
    "killed while the norm is reduced": Failure("killed in", "norm"),
    "killed before the update": Failure("killed before", "update"),
    "killed while it saves": Failure("killed before", "write"),
    "killed before the optimizer reduces overflows": Failure("killed before", "decision"),
    "killed in the first step": Failure("killed before", "norm", step=0),
    "raises before the norm is reduced": Failure("raises before", "norm"),
    "absent from the norm": Failure("absent from", "norm"),
}
# Only a process_group makes the optimizer reduce the overflows again. Other ways to fail than being
# killed, and the first step, are the same with shards.
OF_GROUP = list(FAILURES)[-4:]
CASES = [
    (kind, name)
    for kind in KINDS
    for name in FAILURES
    if kind == "process_group" or name not in OF_GROUP
]
# Seconds from the failure to the end of the other processes. It takes about 0.1 on an idle machine,
# since the system closes the connections of a process that ends.
BOUND = 5.0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the records of all ranks of trainings without a failure."""
    records = {}
    for kind in KINDS:
        ended = play(tmp_path_factory.mktemp(kind), kind)
        assert [one.exit_code for one in ended] == [0] * RANKS
        records[kind] = [one.record for one in ended]
    return records


def assert_same_state(state, expected):
    (tensors, scaler), (others, others_scaler) = state, expected
    assert_same_bits(tensors, others)
    assert scaler == others_scaler


@pytest.mark.parametrize(("kind", "name"), CASES, ids=str)
def test_other_ranks_raise_in_time_after_whole_steps_and_go_on_from_the_checkpoint(
    kind, name, uninterrupted, tmp_path
):
    failure = FAILURES[name]
    ended = play(tmp_path, kind, failure)

    if failure.how == "raises before":
        assert ended[VICTIM].record.error == "ValueError: rank 1 fails"
    else:
        assert ended[VICTIM].exit_code == -signal.SIGKILL
    # All collectives of a step are before its update, and a checkpoint is saved after it.
    steps = failure.step + (failure.where in ("update", "write"))
    is_absent = failure.how == "absent from"
    errors = [one.record.error for one in ended if one.record is not None]
    assert not is_absent or any("Timed out waiting" in error for error in errors)
    for rank, (exit_code, time, record) in enumerate(ended):
        if record is None:
            continue
        assert exit_code == 1
        if rank != VICTIM:  # the timeout of one rank may end the connection of another
            assert re.search("Connection|Broken pipe|Timed out waiting", record.error)
            assert time - record.failed < (TIMEOUT + BOUND if is_absent else BOUND)
        assert list(record.states) == list(range(steps + 1))
        assert_same_state(record.last, uninterrupted[kind][rank].states[steps])

    again = play(tmp_path, kind)

    for rank, (exit_code, _, record) in enumerate(again):
        assert exit_code == 0
        start = failure.step // SAVED_EVERY * SAVED_EVERY
        assert list(record.states) == list(range(start, STEPS + 1))
        for step, state in record.states.items():
            assert_same_state(state, uninterrupted[kind][rank].states[step])


SAVING = """
import os, signal, sys
import ampfuse.checkpoint
import torch
import torch.distributed as dist
from ampfuse.checkpoint import _save, _write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=2)
model = torch.nn.Linear(4, 4)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
_write.LONGEST_WAIT_AFTER_ERROR = 1.0
if rank == 1:
    _save.write_files = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
ampfuse.checkpoint.save(f"{folder}/run", step=1, model=model, background=True)
while True:
    dist.barrier()
"""


def test_rank_0_ends_soon_after_another_is_killed_while_it_saves_in_the_background(tmp_path):
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", SAVING, str(rank), tmp_path], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    )
    try:
        second.communicate(timeout=60)
        assert second.returncode == -signal.SIGKILL
        _, errors = first.communicate(timeout=1.0 + BOUND)
    finally:
        first.kill()
    assert first.returncode == 1
    assert re.search("RuntimeError: .*Connection", errors)
    assert "rank 1 has not written its part" in errors
