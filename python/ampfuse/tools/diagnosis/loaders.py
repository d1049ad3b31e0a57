"""Measures how long batches take to load, also in the workers of a DataLoader.

Workers that are forked inherit what is replaced here, and memory that they share with the program.
Other workers are not measured: `Loader.batch_time` returns None.
"""

import json
import mmap
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from ampfuse.tools.diagnosis.lines import Line, LineSampler
from ampfuse.tools.diagnosis.phases import INPUT
from ampfuse.tools.hooks import hook_loaders
from ampfuse.tools.program_lines import Place

SLOT = 1024  # bytes for each worker: batches, seconds, seconds of the CPU, then lines as JSON
NUMBERS = struct.Struct("ddd")
MOST_LOADERS = 256
LINES_KEPT = 3
LINES_EVERY = 0.25  # seconds between two writings of lines


class BatchTime(NamedTuple):
    """The mean seconds that one process needs for a batch."""

    all: float
    computing: float
    """The seconds in which it computes, without waits for a disk or a network."""


@dataclass
class Loader:
    """A DataLoader: its options, how long the program waited for it, how long batches took."""

    workers: int
    persistent_workers: bool
    prefetch_factor: int
    trains: bool = False
    """True if a backward has followed one of its batches."""
    waited: float = 0.0
    """Seconds that the program waited for batches in steps that are measured."""
    starts: list[float] = field(default_factory=list)
    """Seconds from the start of an iterator to its first batch, for each epoch."""
    batches: int = 0
    """Batches that the program has taken in steps that are measured."""
    shared: Any = field(init=False)
    """A slot for each worker, and one for the program itself."""

    def __post_init__(self) -> None:
        """Allocate the slots."""
        size = SLOT * (self.workers + 1)
        self.shared = mmap.mmap(-1, size) if self.workers else bytearray(size)

    @property
    def options(self) -> tuple[int, bool, int]:
        """The options of the DataLoader."""
        return self.workers, self.persistent_workers, self.prefetch_factor

    def note_batch(self, worker: int, seconds: float, computing: float) -> None:
        """Count a batch that took this long in a worker; the program itself is the last one."""
        offset = SLOT * worker
        count, total, busy = NUMBERS.unpack_from(self.shared, offset)
        NUMBERS.pack_into(self.shared, offset, count + 1, total + seconds, busy + computing)

    def batch_time(self) -> BatchTime | None:
        """Return the time of a batch, if it was measured."""
        slots = [NUMBERS.unpack_from(self.shared, SLOT * i) for i in range(self.workers + 1)]
        batches, seconds, computing = map(sum, zip(*slots, strict=True))
        return BatchTime(seconds / batches, computing / batches) if batches else None

    def note_lines(self, worker: int, lines: list[Line]) -> None:
        """Note the lines in which a worker spends its time."""
        kept = [(*line.place, line.share) for line in lines]
        text = json.dumps(kept).encode()
        if NUMBERS.size + len(text) < SLOT:
            begin = SLOT * worker + NUMBERS.size
            self.shared[begin : begin + len(text) + 1] = text + b"\0"

    def slowest_line(self) -> Line | None:
        """Return the line in which the workers spend most of their time."""
        shares: dict[Place, float] = {}
        measured = 0
        for worker in range(self.workers):
            begin = SLOT * worker + NUMBERS.size
            text = self.shared[begin : SLOT * (worker + 1)].partition(b"\0")[0]
            for where, what, call, share in json.loads(text or b"[]"):
                place = Place(where, what, call)
                shares[place] = shares.get(place, 0.0) + share
            measured += bool(text)
        if not shares:
            return None
        slowest = max(shares, key=lambda one: shares[one])
        return Line(INPUT, slowest, shares[slowest] / measured)


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
        self._in_worker = InWorker()
        hook_loaders(
            exits, iterate=self._timed_start, follow=self._timed_next, fetch=self._timed_fetch
        )

    def note_training(self, iterators: Iterable[int]) -> None:
        """Note that a backward has followed batches of these iterators."""
        for iterator in iterators:
            if (loader := self._of_iterator.get(iterator)) is not None:
                loader.trains = True

    def _known(self, loader: Any) -> Loader | None:
        options = loader.num_workers, loader.persistent_workers, loader.prefetch_factor or 0
        known = self._of_dataset.get(id(loader.dataset))
        if known is not None and known.options == options:
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
                self._in_worker.begin()
            begin, computing = time.perf_counter(), time.thread_time()
            batch = function(fetcher, index)
            computing = time.thread_time() - computing
            end = time.perf_counter()
            slot = loader.workers if worker is None else min(worker.id, loader.workers)
            loader.note_batch(slot, end - begin, computing)
            if worker is not None:
                self._in_worker.end(loader, slot, end)
            return batch

        return timed


class InWorker:
    """Samples the lines of a worker process while it loads batches, in that process."""

    def __init__(self) -> None:
        self._sampler: LineSampler | None = None
        self._written = 0.0

    def begin(self) -> None:
        """Begin a batch."""
        if self._sampler is None:
            self._sampler = LineSampler()
        self._sampler.drop()

    def end(self, loader: Loader, slot: int, now: float) -> None:
        """End a batch, and note the slowest lines now and then."""
        assert self._sampler is not None
        self._sampler.read([(INPUT, now)])
        if slot < loader.workers and now - self._written > LINES_EVERY:
            self._written = now
            loader.note_lines(slot, self._sampler.lines(LINES_KEPT))
