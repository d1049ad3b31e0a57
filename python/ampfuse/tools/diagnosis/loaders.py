"""Measures how long batches take to load, also in the workers of a DataLoader.

Workers that are forked inherit what is replaced here, and memory that they share with the program.
Other workers are not measured: `Loader.batch_time` returns None.
"""

import json
import mmap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from torch.utils.data import get_worker_info

from ampfuse.tools.diagnosis.lines import Line, LineSampler
from ampfuse.tools.diagnosis.phases import INPUT
from ampfuse.tools.hooks import hook_functions
from ampfuse.tools.program_lines import Place, current_line

SLOT = 4096  # bytes that each worker shares with the program: JSON that ends with a zero
MOST_LOADERS = 256
LINES_KEPT = 3
PUBLISHED_EVERY = 0.25  # seconds


@dataclass
class Loader:
    """A DataLoader: its options, how long the program waited for it, how long batches took."""

    workers: int
    persistent_workers: bool
    trains: bool = False
    """True if a backward has followed one of its batches."""
    waited: float = 0.0
    """Seconds that the program waited for batches."""
    starts: list[float] = field(default_factory=list)
    """Seconds from the start of an iterator to its first batch, for each epoch."""
    late_starts: list[float] = field(default_factory=list)
    """Those of them that came after the program's first step."""
    batches: int = 0
    """Batches that the program has taken."""
    loop: str = ""
    """File and line where the program takes them."""
    loaded: int = 0
    """Batches that this process has loaded: the program, or in its own copy a worker."""
    loading: float = 0.0
    """The seconds that these batches took."""
    shared: Any = field(init=False)

    def __post_init__(self) -> None:
        """Allocate the memory that is shared with workers."""
        self.shared = mmap.mmap(-1, SLOT * max(self.workers, 1))

    def publish(self, worker: int, lines: list[Line]) -> None:
        """Share what a worker has measured with the program, and its slowest lines."""
        kept = [(*line.place, line.share) for line in lines]
        text = json.dumps([self.loaded, self.loading, kept]).encode() + b"\0"
        if worker < self.workers and len(text) <= SLOT:
            self.shared[SLOT * worker : SLOT * worker + len(text)] = text

    def _published(self) -> Iterator[tuple[int, float, list[Any]]]:
        for worker in range(self.workers):
            text = self.shared[SLOT * worker : SLOT * (worker + 1)].partition(b"\0")[0]
            try:
                yield json.loads(text)
            except ValueError:  # nothing was published, or a worker does so now
                continue

    def batch_time(self) -> float | None:
        """Return the mean seconds that one process needs for a batch, if that was measured."""
        measured = [(self.loaded, self.loading, []), *self._published()]
        batches = sum(one[0] for one in measured)
        return sum(one[1] for one in measured) / batches if batches else None

    def slowest_line(self) -> Line | None:
        """Return the line in which the workers spend most of their time."""
        of_workers = [lines for *_, lines in self._published() if lines]
        shares: Counter[Place] = Counter()
        for where, text, call, share in (line for lines in of_workers for line in lines):
            shares[Place(where, text, call)] += share
        if not shares:
            return None
        place, share = shares.most_common(1)[0]
        return Line(INPUT, place, share / len(of_workers))


class LoaderWatch:
    """Measures the loaders of a program. Those of one dataset with the same options count as one.

    In this way, a loader that is made again in each epoch is found.
    """

    def __init__(self, exits: ExitStack, note: Callable[..., None]) -> None:
        """Measure until `exits` closes. `note`: see StepClock."""
        self.loaders: list[Loader] = []
        self._note = note
        # By the ids of iterators, and of datasets, which are the same in a forked worker.
        self._of_iterator: dict[int, Loader] = {}
        self._of_dataset: dict[int, Loader] = {}
        self._started: dict[int, float] = {}  # when iterators that have no batch yet were started
        self._has_trained = False  # True after the first step
        self._sampler: LineSampler | None = None  # of a worker, in its process
        self._last_published = 0.0
        timed = {"iterate": self._timed_start, "next_batch": self._timed_next}
        hook_functions(exits, **timed, fetch=self._timed_fetch)

    def note_training(self, iterators: Iterable[int]) -> None:
        """Note that a backward has followed batches of these iterators."""
        self._has_trained = True
        for iterator in iterators:
            if (loader := self._of_iterator.get(iterator)) is not None:
                loader.trains = True

    def _known(self, loader: Any) -> Loader | None:
        options = loader.num_workers, loader.persistent_workers
        known = self._of_dataset.get(id(loader.dataset))
        if known is not None and (known.workers, known.persistent_workers) == options:
            return known
        if len(self.loaders) >= MOST_LOADERS:
            return None
        made = self._of_dataset[id(loader.dataset)] = Loader(*options)
        self.loaders.append(made)
        return made

    def _timed_start(self, function: Any) -> Any:
        @wraps(function)
        def timed(loader: Any) -> Any:
            known = self._known(loader)
            begin = time.perf_counter()
            self._note(INPUT, True, id(loader))
            try:
                iterator = function(loader)
            finally:
                self._note(INPUT, False, id(loader))
            if known is not None:
                self._of_iterator[id(iterator)] = known
                self._started[id(iterator)] = begin
            return iterator

        return timed

    def _timed_next(self, function: Any) -> Any:
        @wraps(function)
        def timed(iterator: Any) -> Any:
            is_exhausted = False
            begin = time.perf_counter()
            self._note(INPUT, True, id(iterator))
            try:
                batch = function(iterator)
            except StopIteration:
                is_exhausted = True
                raise
            finally:
                self._note(INPUT, False, id(iterator), is_exhausted)
            if (known := self._of_iterator.get(id(iterator))) is not None:
                end = time.perf_counter()
                if (start := self._started.pop(id(iterator), None)) is not None:
                    known.starts.append(end - start)
                    known.loop = line.where if (line := current_line()) else ""
                    if self._has_trained:
                        known.late_starts.append(end - start)
                known.waited += end - begin
                known.batches += 1
            return batch

        return timed

    def _timed_fetch(self, function: Any) -> Any:
        @wraps(function)
        def timed(fetcher: Any, index: Any) -> Any:
            worker = get_worker_info()
            loader = self._of_dataset.get(id(fetcher.dataset))
            if loader is None or (worker is not None and worker.dataset is not fetcher.dataset):
                return function(fetcher, index)  # for example a loader inside of a dataset
            if worker is not None:
                self._sampler = self._sampler or LineSampler()
                self._sampler.drop()
            begin = time.perf_counter()
            batch = function(fetcher, index)
            end = time.perf_counter()
            loader.loaded += 1
            loader.loading += end - begin
            if worker is not None and self._sampler is not None:
                self._sampler.read([(INPUT, end)])
                if end - self._last_published > PUBLISHED_EVERY:
                    self._last_published = end
                    loader.publish(worker.id, self._sampler.lines(LINES_KEPT))
            return batch

        return timed
