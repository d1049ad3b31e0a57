"""A process that is killed at any instant leaves its last checkpoint, and no half of one."""

import os
import signal
import sys
from itertools import count

import ampfuse.checkpoint as checkpoint
import pytest
import torch
from torch import nn

EVENTS = ("open", "os.", "shutil.", "fcntl.")  # audit events of what changes files or locks


def save(folder, step, **options):
    """Save a model whose tensors all hold the step."""
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    for param in model.parameters():
        nn.init.constant_(param, step)
    return checkpoint.save(folder, step=step, model=model, values=step, keep=1, **options)


def save_twice(folder, background, last):
    """Save steps 2 and 3 in a process that is killed before the event of this number."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        events = count()

        def kill(event, _):
            if event.startswith(EVENTS) and next(events) == last:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(kill)
            save(folder, 2, background=background)
            save(folder, 3, background=background).wait()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("background", [False, True])
def test_kill_before_any_change_of_a_file_loses_nothing(tmp_path, background):
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    steps, unfinished = [], 0
    for last in count():
        folder = tmp_path / str(last)
        save(folder, 1)
        code = save_twice(folder, background, last)
        assert code in (0, -signal.SIGKILL)
        names = [path.name for path in folder.iterdir()]
        unfinished += any(name.startswith(".unfinished") for name in names)
        checkpoint.verify(folder)
        found = checkpoint.load(folder, model=model)
        assert found.step == found.values
        assert all((param == found.step).all() for param in model.parameters())
        steps.append(found.step)
        save(folder, 4)  # removes what is left
        assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000004"]
        if code == 0:
            break
    assert set(steps) == {1, 2, 3}
    assert unfinished > 10
