"""How long batches take to load, in the program and in the workers of a DataLoader."""

import inspect
import time
from contextlib import ExitStack

import pytest
import torch
from ampfuse.diagnosis._loaders import LoaderWatch
from torch.utils.data import DataLoader, Dataset, IterableDataset

PAUSE = 0.02


@pytest.fixture
def watch():
    with ExitStack() as exits:
        notes = []
        made = LoaderWatch(exits, lambda *note: notes.append(note))
        made.notes = notes
        yield made


class Slow(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        time.sleep(PAUSE)
        return torch.zeros(1)


class SlowStream(IterableDataset):
    def __iter__(self):
        for _ in range(16):
            time.sleep(PAUSE)
            yield torch.zeros(1)


LINE = f"test_loaders.py:{inspect.getsourcelines(Slow.__getitem__)[1] + 1}"


@pytest.mark.parametrize("dataset", [Slow(), SlowStream(), [torch.zeros(1)] * 16])
def test_batches_of_the_program_itself_are_measured(watch, dataset):
    assert len(list(DataLoader(dataset, 4))) == 4
    (loader,) = watch.loaders
    assert loader.workers == 0
    assert loader.waits == 4
    assert [begins for _, begins, *_ in watch.notes] == [True, False] * 6  # one is __iter__
    assert [note[-1] for note in watch.notes if len(note) == 4] == [False] * 4 + [True]
    if not isinstance(dataset, list):
        assert loader.seconds() >= 4 * PAUSE * 0.8  # a stream has a fifth batch, without samples
        assert loader.waited >= 16 * PAUSE


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_of_workers_are_measured_over_all_epochs(watch, persistent):
    loader = DataLoader(Slow(), 4, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        assert len(list(loader)) == 4
    (found,) = watch.loaders
    assert (found.workers, found.persistent_workers, found.pin_memory) == (2, persistent, False)
    assert found.seconds() == pytest.approx(4 * PAUSE, rel=0.5)
    assert found.seconds() >= 4 * PAUSE
    assert len(found.starts) == 2
    line = found.slowest_line()
    assert line.place.where == LINE
    assert line.place.text == "time.sleep(PAUSE)"
    assert line.share > 0.5


@pytest.mark.slow
def test_workers_that_are_not_forked_are_not_measured(watch):
    loader = DataLoader([1, 2, 3, 4], 2, num_workers=1, multiprocessing_context="spawn")
    assert len(list(loader)) == 2
    (found,) = watch.loaders
    assert found.seconds() is None
    assert found.slowest_line() is None


def test_error_in_a_worker_reaches_the_program(watch):
    class Broken(Slow):
        def __getitem__(self, index):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        list(DataLoader(Broken(), 4, num_workers=1))


def test_loader_of_one_dataset_is_not_taken_for_another(watch):
    list(DataLoader(Slow(), 4))
    list(DataLoader([1, 2], 1))
    slow, quick = watch.loaders
    assert slow.seconds() >= 4 * PAUSE
    assert quick.seconds() < PAUSE
