"""The folder of a run: which checkpoints there are, which are kept, and who may write."""

import os
import signal
import subprocess
import sys
import threading
import time

import ampfuse.checkpoint as checkpoint
import pytest
import torch
from ampfuse.checkpoint import CheckpointError, _folder, _index, _save, _tensor_file, _write
from torch import nn


@pytest.fixture
def model():
    return nn.Linear(3, 3)


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_latest_is_the_highest_step_that_is_complete(tmp_path, model):
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, step=step, model=model)
    (tmp_path / "step-00000200").mkdir()
    (tmp_path / "step-00000300.txt").write_text("")
    assert checkpoint.latest(tmp_path).name == "step-00000100"
    assert checkpoint.load(str(tmp_path), model=model).step == 100
    assert checkpoint.load(tmp_path / "step-00000009", model=model).step == 9


@pytest.mark.parametrize("keep", [1, 2])
def test_old_checkpoints_are_removed_after_the_new_one_is_there(tmp_path, model, keep):
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step=step, model=model, keep=keep)
    assert names(tmp_path) == [f"step-0000000{step}" for step in range(5 - keep, 5)]


def test_step_that_is_saved_again_takes_the_place_of_the_first(tmp_path, model):
    first, *_ = (checkpoint.save(tmp_path, step=step, model=model).path for step in (1, 2, 3))
    nn.init.ones_(model.weight)
    with pytest.warns(UserWarning, match="step-00000001.1 is not the latest checkpoint"):
        second = checkpoint.save(tmp_path, step=1, model=model, keep=2).path
    # It is not removed with old ones, and later ones are another run's.
    assert names(tmp_path) == [second.name, "step-00000002", "step-00000003"]
    assert second != first
    nn.init.zeros_(model.weight)
    checkpoint.load(second, model=model)
    assert (model.weight == 1).all()


def test_unfinished_and_half_removed_folders_are_removed_by_the_next_save(tmp_path, model):
    for name in (".unfinished-step-00000001", ".removed-step-00000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.json").write_text("{}")
    assert checkpoint.latest(tmp_path) is None
    checkpoint.save(tmp_path, step=1, model=model)
    assert names(tmp_path) == ["step-00000001"]


SECOND_WRITER = """
import sys
import ampfuse.checkpoint
ampfuse.checkpoint.save(sys.argv[1], step=2)
"""


def test_second_writer_is_refused_while_the_first_one_writes(programs, tmp_path, model):
    checkpoint.save(tmp_path, step=1, model=model)
    first = _folder.Writing(tmp_path, 3)
    done = programs.run("-c", SECOND_WRITER, tmp_path)
    message = f"CheckpointError: {tmp_path}: another process writes a checkpoint here now"
    assert done.stderr.splitlines()[-1].endswith(message)
    first.close()
    assert names(tmp_path) == ["step-00000001"]
    assert programs.run("-c", SECOND_WRITER, tmp_path).returncode == 0
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "ampfuse", tmp_path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root can mount a disk")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_full_disk_is_named_and_the_last_checkpoint_stays(small_disk):
    small, large = nn.Linear(100, 100), nn.Linear(1000, 1000)
    checkpoint.save(small_disk, step=1, model=small, keep=1)
    message = f"{small_disk}: the checkpoint of step 2 could not be written: .*[Nn]o space left"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(small_disk, step=2, model=large, keep=1)
    assert names(small_disk) == ["step-00000001"]
    checkpoint.load(small_disk, model=small)
    assert checkpoint.save(small_disk, step=3, model=small, keep=1).path.name == "step-00000003"


def test_failure_at_any_write_leaves_the_last_checkpoint(tmp_path, model, monkeypatch):
    checkpoint.save(tmp_path, step=1, model=model)
    calls, flushes = [], _tensor_file.flush
    for fails_at in range(1, 5):
        calls.clear()

        def flush(path, fails_at=fails_at):
            calls.append(path)
            if len(calls) == fails_at:
                raise OSError(28, "No space left on device")
            flushes(path)

        for module in (_tensor_file, _index, _folder):
            monkeypatch.setattr(module, "flush", flush)
        with pytest.raises(CheckpointError, match="No space left on device"):
            checkpoint.save(tmp_path, step=2, model=model)
        assert len(calls) == fails_at
        assert checkpoint.verify(tmp_path).is_dir()


@pytest.fixture
def held_back(monkeypatch):
    """Hold back what saves in the background write until this event is set."""
    go_on, writes = threading.Event(), _save.write_files
    monkeypatch.setattr(_save, "write_files", lambda *args: go_on.wait() and writes(*args))
    return go_on


def test_background_save_holds_values_and_folder_of_when_it_was_called(
    tmp_path, model, held_back, monkeypatch
):
    run, weights = tmp_path / "run", model.weight.clone()
    monkeypatch.chdir(tmp_path)
    saving = checkpoint.save("run", step=1, model=model, background=True)
    nn.init.zeros_(model.weight)
    monkeypatch.chdir(run)
    assert not saving.done()
    assert checkpoint.latest(run) is None
    held_back.set()
    assert saving.wait() == checkpoint.latest(run) == run / "step-00000001"
    assert saving.done()
    checkpoint.load(run, model=model)
    assert torch.equal(model.weight, weights)


def test_saves_in_the_background_wait_for_each_other(tmp_path, model):
    options = {"model": model, "background": True, "keep": 3}
    savings = [checkpoint.save(tmp_path, step=step, **options) for step in range(10)]
    steps = [f"step-0000000{step}" for step in range(10)]
    assert [saving.wait().name for saving in savings] == steps
    assert names(tmp_path) == steps[7:]


def no_space(*_, ignore_errors=False):
    if not ignore_errors:
        raise OSError(28, "No space left on device")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_error_in_the_background_is_raised_by_wait(tmp_path, model, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(_save, "write_files", no_space)
        saving = checkpoint.save(tmp_path, step=1, model=model, background=True)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No space left on device"):
                saving.wait()
    checkpoint.save(tmp_path, step=1, model=model)


def test_forked_process_does_not_keep_the_lock(tmp_path, model):
    writing = _folder.Writing(tmp_path, 3)
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    writing.close()
    checkpoint.save(tmp_path, step=1, model=model)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_disk_without_locks_is_written_with_a_warning(tmp_path, model, monkeypatch):
    def flock(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(_folder.fcntl, "flock", flock)
    for step in (1, 2):  # the first one lets the second one write
        with pytest.warns(UserWarning, match=r"cannot be locked \(Function not implemented\)"):
            checkpoint.save(tmp_path, step=step, model=model)
    assert checkpoint.latest(tmp_path).name == "step-00000002"


def test_save_in_a_signal_handler_during_a_save_is_refused(tmp_path, model, monkeypatch):
    errors = []

    def handle(*_):
        with pytest.raises(CheckpointError, match="a save of this thread is under way") as error:
            checkpoint.save(tmp_path, step=2, model=model)
        errors.append(error)

    writes = _save.write_files

    def interrupted(*args):
        signal.raise_signal(signal.SIGUSR1)
        return writes(*args)

    before = signal.signal(signal.SIGUSR1, handle)
    with monkeypatch.context() as patch:
        patch.setattr(_save, "write_files", interrupted)
        checkpoint.save(tmp_path, step=1, model=model)
    signal.signal(signal.SIGUSR1, before)
    assert len(errors) == 1
    assert checkpoint.save(tmp_path, step=2, model=model).wait().is_dir()


def test_interrupt_before_the_thread_starts_releases_the_lock(tmp_path, model, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(KeyboardInterrupt):
            checkpoint.save(tmp_path, step=1, model=model, background=True)
    checkpoint.save(tmp_path, step=1, model=model)


def test_folder_of_a_checkpoint_is_not_that_of_a_run(tmp_path, model):
    path = checkpoint.save(tmp_path, step=10, model=model).path
    with pytest.raises(CheckpointError, match="this is a checkpoint; pass the folder of the run"):
        checkpoint.save(path, step=20, model=model)
    with pytest.raises(CheckpointError, match="this is a file; pass the folder that it is in"):
        checkpoint.load(path / "checkpoint.json", model=model)


@pytest.mark.parametrize("keep", [None, 1, 2])
def test_save_of_an_earlier_step_warns_and_removes_no_later_checkpoint(tmp_path, model, keep):
    latest = checkpoint.save(tmp_path, step=100, model=model).path
    for step in (1, 2, 3):
        with pytest.warns(UserWarning, match=f"step-0000000{step} is not the latest checkpoint"):
            checkpoint.save(tmp_path, step=step, model=model, keep=keep)
    assert checkpoint.latest(tmp_path) == latest
    assert len(names(tmp_path)) == 1 + (keep or 3)


def test_folders_of_others_are_left_alone(tmp_path, model):
    for name in ("step-40", "step-00000040"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    path = checkpoint.save(tmp_path, step=40, model=model, keep=1).path
    assert path.name == "step-00000040.1"
    for name in ("step-40", "step-00000040"):
        assert (tmp_path / name / "notes.txt").read_text() == "mine"


def test_checkpoint_that_cannot_be_removed_is_a_warning(tmp_path, model, monkeypatch):
    checkpoint.save(tmp_path, step=1, model=model)
    with monkeypatch.context() as patch:
        patch.setattr(_folder.shutil, "rmtree", no_space)
        for step in (2, 3):
            with pytest.warns(UserWarning, match="cannot be removed: .*No space"):
                checkpoint.save(tmp_path, step=step, model=model, keep=1)
    assert checkpoint.latest(tmp_path).name == "step-00000003"


def test_large_states_are_written_in_several_files(tmp_path, monkeypatch):
    monkeypatch.setattr(_write, "MOST_BYTES", 1000)
    model, other = (nn.Sequential(*(nn.Linear(10, 10) for _ in range(8))) for _ in range(2))
    path = checkpoint.save(tmp_path, step=1, model=model, rng=False).path
    assert len(list(path.glob("*.safetensors"))) == 4
    checkpoint.load(tmp_path, model=other)
    assert torch.equal(other[7].weight, model[7].weight)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    for name in ("xxhash", "safetensors.torch"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            package = name.partition(".")[0]
            message = f"ampfuse.checkpoint needs {package}: pip install safetensors xxhash"
            with pytest.raises(ImportError, match=message):
                checkpoint.save(tmp_path / "run", step=1)
    assert not (tmp_path / "run").exists()
