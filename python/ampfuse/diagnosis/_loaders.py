"""Measures how long batches take to load, also in the workers of a DataLoader.

Workers that are forked inherit what is replaced here, and memory that they share with the program.
Other workers are not measured: `Loader.seconds` is None.
"""

import json
import mmap
import struct
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils.fetch import _IterableDatasetFetcher, _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ampfuse._program_lines import Place
from ampfuse._replacing import replace
from ampfuse.diagnosis._lines import Line, LineSampler
from ampfuse.diagnosis._phases import INPUT

SLOT = 1024  # bytes for each worker: batches and seconds, then lines as JSON
NUMBERS = struct.Struct("dd")
LINES_KEPT = 3
LINES_EVERY = 0.25  # seconds between two writings of lines


@dataclass
class Loader:
    """A DataLoader: its options, how long the program waited for it, how long batches took."""

    workers: int
    persistent_workers: bool
    pin_memory: bool
    waits: int = 0
    waited: float = 0.0
    """Seconds that the program waited for batches."""
    starts: list[float] = field(default_factory=list)
    """Seconds until an iterator was made, for each epoch."""
    shared: mmap.mmap = field(init=False)
    """A slot for each worker, and one for the program itself."""

    def __post_init__(self) -> None:
        self.shared = mmap.mmap(-1, SLOT * (self.workers + 1))

    def note_batch(self, worker: int, seconds: float) -> None:
        """Count a batch that took this long in a worker; the program itself is the last one."""
        batches, total = NUMBERS.unpack_from(self.shared, SLOT * worker)
        NUMBERS.pack_into(self.shared, SLOT * worker, batches + 1, total + seconds)

    def note_lines(self, worker: int, lines: list[Line]) -> None:
        """Note the lines in which a worker spends its time."""
        kept = [(*line.place, line.share) for line in lines[:LINES_KEPT]]
        text = json.dumps(kept).encode()
        if NUMBERS.size + len(text) < SLOT:
            begin = SLOT * worker + NUMBERS.size
            self.shared[begin : begin + len(text) + 1] = text + b"\0"

    def seconds(self) -> float | None:
        """Return the mean seconds that one process needed for a batch, if that was measured."""
        slots = [NUMBERS.unpack_from(self.shared, SLOT * i) for i in range(self.workers + 1)]
        batches = sum(slot[0] for slot in slots)
        return sum(slot[1] for slot in slots) / batches if batches else None

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
    """Measures all loaders of a program."""

    def __init__(self, exits: ExitStack, note: Callable[..., None]) -> None:
        """Measure until `exits` closes. `note`: see StepClock."""
        self.loaders: list[Loader] = []
        self._note = note
        self._of_iterator: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
        self._of_loader: weakref.WeakKeyDictionary[Any, Loader] = weakref.WeakKeyDictionary()
        self._of_dataset: dict[int, Loader] = {}  # by id, which is the same in a forked worker
        self._in_worker = InWorker()
        replace(exits, DataLoader, "__iter__", self._timed_start(DataLoader.__iter__))
        replace(exits, _BaseDataLoaderIter, "__next__", self._timed_next())
        for fetcher in (_MapDatasetFetcher, _IterableDatasetFetcher):
            replace(exits, fetcher, "fetch", self._timed_fetch(fetcher.fetch))

    def _timed_start(self, function: Any) -> Any:
        @wraps(function)
        def timed(loader: Any) -> Any:
            known = self._of_loader.get(loader)
            if known is None:
                known = Loader(loader.num_workers, loader.persistent_workers, loader.pin_memory)
                self._of_loader[loader] = known
                self.loaders.append(known)
            self._of_dataset[id(loader.dataset)] = known
            begin = time.perf_counter()
            self._note(INPUT, True, id(loader))
            try:
                iterator = function(loader)
            finally:
                self._note(INPUT, False)
            known.starts.append(time.perf_counter() - begin)
            self._of_iterator[iterator] = known
            return iterator

        return timed

    def _timed_next(self) -> Any:
        function: Any = _BaseDataLoaderIter.__next__

        @wraps(function)
        def timed(iterator: Any) -> Any:
            begin = time.perf_counter()
            is_exhausted = False
            self._note(INPUT, True, id(iterator))
            try:
                batch = function(iterator)
            except StopIteration:
                is_exhausted = True
                raise
            finally:
                self._note(INPUT, False, id(iterator), is_exhausted)
            if (known := self._of_iterator.get(iterator)) is not None:
                known.waits += 1
                known.waited += time.perf_counter() - begin
            return batch

        return timed

    def _timed_fetch(self, function: Any) -> Any:
        @wraps(function)
        def timed(fetcher: Any, index: Any) -> Any:
            loader = self._of_dataset.get(id(fetcher.dataset))
            if loader is None:
                return function(fetcher, index)
            worker = get_worker_info()
            if worker is not None:
                return self._in_worker.fetch(loader, worker.id, function, fetcher, index)
            begin = time.perf_counter()
            batch = function(fetcher, index)
            loader.note_batch(loader.workers, time.perf_counter() - begin)
            return batch

        return timed


class InWorker:
    """Measures the batches of a worker process, in that process."""

    def __init__(self) -> None:
        self._sampler: LineSampler | None = None
        self._written = 0.0

    def fetch(self, loader: Loader, worker: int, function: Any, fetcher: Any, index: Any) -> Any:
        """Load a batch with `function`."""
        if self._sampler is None:
            self._sampler = LineSampler()
            self._sampler.start()
        self._sampler.drop()
        begin = time.perf_counter()
        batch = function(fetcher, index)
        end = time.perf_counter()
        self._sampler.read([(INPUT, end)])
        loader.note_batch(worker, end - begin)
        if end - self._written > LINES_EVERY:
            self._written = end
            loader.note_lines(worker, self._sampler.lines())
        return batch
