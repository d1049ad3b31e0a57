"""Lists of tensors that are shared among threads, and lists that are not.

If other processes use all cores, a thread that is woken starts a time slice late. This is many
times as long as a list of small tensors takes.
"""

import subprocess
import sys
from pathlib import Path

import pytest

TASKS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not TASKS.is_dir(), reason="threads are counted in /proc")

PROGRAM = """
import os, sys
import ampfuse, torch

torch.set_num_threads(1)
count, size = int(sys.argv[1]), int(sys.argv[2])
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


def new_threads(*arguments: int) -> int:
    """Return how many threads OpenMP starts, at the first shared loop, in a new process."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(("count", "size"), [(10, 512), (1000, 1024), (10_000, 64), (20, 32768)])
def test_lists_of_small_tensors_wake_no_thread(count, size):
    assert new_threads(count, size) == 0


def test_long_tensors_are_shared_among_threads():
    assert new_threads(4, 32769) == 3


def test_lists_that_take_milliseconds_are_shared_among_threads():
    assert new_threads(10_000, 1024) == 3
