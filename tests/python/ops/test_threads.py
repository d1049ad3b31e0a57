"""Lists of tensors that are shared among threads, and lists that are not.

If other processes use all cores, a thread that is woken starts a time slice late. This is many
times as long as a list of small tensors takes.
"""

import sys
from pathlib import Path

import pytest
import warm

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not TASKS.is_dir(), reason="threads are counted in /proc")

PROGRAM = """
import os, sys
import ampfuse, torch

for argument in sys.argv[1:]:
    count, size = map(int, argument.split("x"))
    torch.set_num_threads(1)
    params = [torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    torch.set_num_threads(4)
    before = len(os.listdir("/proc/self/task"))
    optimizer, scaler = ampfuse.AdamW(params, max_grad_norm=1.0), ampfuse.GradScaler("cpu")
    for _ in range(3):
        scaler.scale(torch.ones(()))
        scaler.clip_grad_norm_(optimizer, 1.0)
        ampfuse.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
    print(len(os.listdir("/proc/self/task")) - before)
"""


def new_threads(*lists):
    """Return how many threads OpenMP starts, at the first shared loop of a process, for lists."""
    command = [sys.executable, "-c", PROGRAM, *lists]
    done = warm.run(command, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.splitlines()]


def test_long_tensors_are_shared_among_threads_and_lists_of_small_ones_are_not():
    small = ["10x512", "1000x1024", "10000x64", "20x32768"]

    assert new_threads(*small, "4x32769") == [0, 0, 0, 0, 3]


def test_lists_that_take_milliseconds_are_shared_among_threads():
    assert new_threads("10000x1024") == [3]
