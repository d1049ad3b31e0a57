"""How long batches take to load, in the program and in the workers of a DataLoader."""

import inspect
import time
from contextlib import ExitStack

import pytest
import torch
from ampfuse.tools.diagnosis.lines import Line
from ampfuse.tools.diagnosis.loaders import SLOT, Loader, LoaderWatch
from ampfuse.tools.diagnosis.phases import INPUT
from ampfuse.tools.program_lines import Place
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
    assert loader.batches == 4
    assert [begins for _, begins, *_ in watch.notes] == [True, False] * 6  # one is __iter__
    assert [note[-1] for note in watch.notes if len(note) == 4] == [False] * 4 + [True]
    if not isinstance(dataset, list):
        # A stream has a fifth batch, without samples.
        assert loader.batch_time() >= 4 * PAUSE * 0.8
        assert loader.waited >= 16 * PAUSE


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_of_workers_are_measured_over_all_epochs(watch, persistent):
    loader = DataLoader(Slow(), 4, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        assert len(list(loader)) == 4
    (found,) = watch.loaders
    assert (found.workers, found.persistent_workers) == (2, persistent)
    assert 4 * PAUSE <= found.batch_time() < 16 * PAUSE
    assert len(found.starts) == 2
    line = found.slowest_line()
    assert line.place.where == LINE
    assert line.place.text == "time.sleep(PAUSE)"
    assert line.share > 0.5


def test_worker_publishes_its_slowest_lines_and_may_do_so_at_this_moment():
    loader = Loader(2, False, loaded=3, loading=6.0)
    line = Line(INPUT, Place("train.py:3", "x = é()", "é"), 0.8)
    loader.publish(0, [line])
    loader.publish(1, [line._replace(place=Place("a" * SLOT, "", ""))])  # which is too long
    assert loader.slowest_line() == line
    assert loader.batch_time() == 2.0
    loader.shared[1] = ord("x")
    assert loader.slowest_line() is None


@pytest.mark.slow
def test_workers_that_are_not_forked_are_not_measured(watch):
    loader = DataLoader([1, 2, 3, 4], 2, num_workers=1, multiprocessing_context="spawn")
    assert len(list(loader)) == 2
    (found,) = watch.loaders
    assert found.batch_time() is None
    assert found.slowest_line() is None


def test_starts_before_the_first_step_are_not_late(watch):
    data = [torch.zeros(1)] * 2
    for _ in range(3):
        next(iterator := iter(DataLoader(data)))
        watch.note_training([id(iterator)])
    (loader,) = watch.loaders
    assert len(loader.starts) == 3
    assert loader.late_starts == loader.starts[1:]


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
    assert slow.batch_time() >= 4 * PAUSE
    assert quick.batch_time() < 4 * PAUSE


def test_loaders_of_one_dataset_with_the_same_options_count_as_one(watch):
    dataset = Slow()
    for _ in range(3):
        next(iter(DataLoader(dataset, 4)))
    next(iter(DataLoader(dataset, 4, num_workers=1)))
    first, second = watch.loaders
    assert (first.workers, len(first.starts), first.batches) == (0, 3, 3)
    assert (second.workers, second.batches) == (1, 1)


def test_many_loaders_take_bounded_memory(watch):
    kept = [[torch.zeros(1)] * 2 for _ in range(300)]  # datasets with ids of their own
    for dataset in kept:
        next(iter(DataLoader(dataset)))
    assert len(watch.loaders) == 256


class Outer(Slow):
    def __getitem__(self, index):
        return torch.stack([batch.sum() for batch in DataLoader(torch.ones(8, 2), 4)])


def test_loader_inside_of_a_dataset_is_left_alone_in_workers(watch):
    assert len(list(DataLoader(Outer(), 4, num_workers=2))) == 4
    (loader,) = watch.loaders
    assert loader.batch_time() is not None


class Equal(DataLoader):
    def __eq__(self, other):
        return True

    __hash__ = None


class OwnIterator(DataLoader):
    def _get_iterator(self):
        return iter([1, 2, 3])


@pytest.mark.parametrize("kind", [Equal, OwnIterator])
def test_odd_loaders_work(watch, kind):
    assert len(list(kind([torch.zeros(1)] * 3))) == 3


def test_loaders_whose_batches_are_trained_on_are_known(watch):
    iterators = [iter(DataLoader([1, 2])), iter(DataLoader([3, 4]))]
    watch.note_training([id(iterators[1])])
    assert [loader.trains for loader in watch.loaders] == [False, True]
