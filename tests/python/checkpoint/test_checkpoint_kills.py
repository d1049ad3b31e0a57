"""A process that is killed at any instant leaves its last checkpoint, and no half of one."""

import os
import random
import signal
import time

import ampfuse.checkpoint as checkpoint
import pytest
import torch
from torch import nn

KILLS = 200
LONGEST = 0.15  # seconds; a save takes a few milliseconds


def write_for_ever(folder, background, step):
    """Save checkpoints whose tensors all hold their step."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    while True:
        step += 1
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(step)
        checkpoint.save(folder, step=step, model=model, values=step, keep=2, background=background)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_200_kills_at_random_instants_lose_nothing(tmp_path, background):
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    chosen = random.Random(0)
    last, unfinished = 0, 0
    for _ in range(KILLS // 2):
        child = os.fork()
        if child == 0:
            try:
                write_for_ever(tmp_path, background, last)
            finally:
                os._exit(1)
        time.sleep(chosen.uniform(0, LONGEST))
        before = checkpoint.latest(tmp_path)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished += any(path.name.startswith(".unfinished") for path in tmp_path.iterdir())
        if (newest := checkpoint.latest(tmp_path)) is None:
            continue
        assert before is None or newest.name >= before.name
        checkpoint.verify(newest)
        found = checkpoint.load(tmp_path, model=model)
        assert found.step == found.values >= last
        assert all((param == found.step).all() for param in model.parameters())
        last = found.step
    assert last > KILLS // 2
    assert unfinished > KILLS // 20  # some kills were in the middle of a save
