"""A scaler's history on the device: its counters, the last updates and the last steps."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampfuse._graphs import eager_only, is_capturing, is_in_graph
from ampfuse._host_copy import HostCopy
from ampfuse.gradients.inspection import Inspection

# The number of norms, the mean and variance of their logarithms, and the limit of the next one.
NO_NORMS = [0.0, 0.0, 0.0, math.inf]
REPORTED_STEPS = 16  # number of last steps that an overflow report searches


class ScaleCollapseError(RuntimeError):
    """`max_consecutive_skips` steps in a row overflowed.

    The scale has been updated nevertheless, so training may go on.
    """

    __module__ = "ampfuse"  # the module from which users import it


class ScaleRecord(NamedTuple):
    """One update of the scale, as `GradScaler.history` returns it."""

    scale: float
    """The scale before the update."""
    skipped: bool
    """True if the step was skipped: a gradient was non-finite, or a finite norm an outlier."""
    norm: float
    """Norm of all unscaled gradients; NaN if it was not computed."""


ScaleRecord.__module__ = "ampfuse"  # the module from which users import it


class LastStep(NamedTuple):
    """The record of the last step."""

    found_inf: Tensor | None
    graph_step: tuple[Tensor, Inspection | None] | None
    is_replayed: bool


class HistorySnapshot(NamedTuple):
    """All that steps and updates change in a history."""

    counts: list[int]
    norms: list[float]
    records: list[ScaleRecord]
    recorded_from: int
    steps: list[tuple[Tensor, Inspection]]
    last_step: LastStep


class ScalerHistory:
    """The record of a scaler, except its scale and growth tracker, which torch's class stores."""

    def __init__(
        self, counters: Sequence[int], history: int, norms: Sequence[float] = NO_NORMS
    ) -> None:
        self._first_counters = list(counters)
        self._first_norms = list(norms)
        self._norms: Tensor | None = None
        self.length = history
        self._counters: Tensor | None = None
        self._records: Tensor | None = None
        self._recorded_from = counters[2]  # index of the first update that has a record
        self._first_records: list[ScaleRecord] = []  # the loaded ones, from that index on
        self._found_inf: Tensor | None = None  # flag of the last step
        self._is_replayed = False  # True if a graph may replay that step unnoticed
        self._counters_copy = HostCopy()
        self._consecutive_skips = 0  # the last number that the host has received
        self._found_inf_copy: HostCopy | None = None  # created by the first was_skipped()
        self._steps: deque[tuple[Tensor, Inspection]] = deque(maxlen=REPORTED_STEPS)
        # The last step, if it was captured or compiled.
        self._graph_step: tuple[Tensor, Inspection | None] | None = None

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return the counters and the history; create them on the device if needed."""
        if self._counters is None or self._counters.device != device:
            counts, records = self.counts(), self.records()
            self._counters = torch.zeros(len(counts), dtype=torch.int64, device=device)
            self.set_counts(counts)
            self._records = None
            self.put_records(records)
            if self.length:
                self._records = self._make_records().to(device)
        return self._counters, self._records

    def statistics(self, device: torch.device) -> Tensor:
        """Return the statistics of norms; create them on the device if needed."""
        if self._norms is None or self._norms.device != device:
            self._norms = torch.tensor(self.norms(), dtype=torch.float64, device=device)
        return self._norms

    def norms(self) -> list[float]:
        """Return the number of norms, mean and variance of their logarithms, and the limit."""
        found: list[float] = self._first_norms if self._norms is None else self._norms.tolist()
        return found

    def set_norms(self, norms: Sequence[float]) -> None:
        """Set the statistics of norms, in place if they are on a device already."""
        self._first_norms = list(norms)
        if self._norms is not None:
            self._norms.copy_(torch.tensor(self._first_norms, dtype=torch.float64))

    def counts(self) -> list[int]:
        """Return the hysteresis tracker, the overflows in a row and the number of updates."""
        return self._first_counters if self._counters is None else self._counters.tolist()

    def put_records(self, records: list[ScaleRecord]) -> None:
        """Set the records of earlier updates. Call this after the counters were set."""
        self._first_records = records[max(len(records) - self.length, 0) :]
        self._recorded_from = self._first_counters[2] - len(self._first_records)
        if self._records is not None:
            self._records.copy_(self._make_records())

    def _make_records(self) -> Tensor:
        """Return a history on the CPU that holds only these records."""
        rows = torch.zeros(self.length, 3, dtype=torch.float32, device="cpu")
        for index, record in enumerate(self._first_records, self._recorded_from):
            rows[index % self.length] = torch.tensor(record, dtype=torch.float32, device="cpu")
        return rows

    def recorded_updates(self) -> int:
        """Return the number of updates that a history of unlimited length would hold."""
        return self.counts()[2] - self._recorded_from

    def set_counts(self, counts: Sequence[int]) -> None:
        """Set the counters, in place if they are on a device already, and empty the history."""
        self._first_counters = list(counts)
        self._counters_copy, self._consecutive_skips = HostCopy(), counts[1]
        self._recorded_from, self._first_records = counts[2], []
        if self._counters is not None:
            for index, count in enumerate(counts):
                self._counters[index].fill_(count)

    def note_step(self, found_inf: Tensor, inspection: Inspection | None) -> None:
        """Record a step that is about to be taken, or skipped if the flag is set."""
        self._found_inf = found_inf
        if is_in_graph():
            # Read no attribute here: a compiled graph would be specialised on its value.
            self._is_replayed, self._graph_step = True, (found_inf, inspection)
            return
        self._is_replayed, self._graph_step = False, None
        if self._found_inf_copy is not None:
            self._found_inf_copy.send(found_inf)
        if inspection is not None:
            self._steps.append((found_inf, inspection))

    @property
    def has_stepped(self) -> bool:
        """True if a step was recorded."""
        return self._found_inf is not None

    @property
    def is_last_in_graph(self) -> bool:
        """True if the last step was captured or compiled."""
        return self._is_replayed

    def note_taken(self) -> None:
        """Record that the step of the last update was taken, whatever its flag was."""
        if self._records is not None and self._counters is not None:
            last = (self._counters[2:] - 1) % self.length
            self._records[:, 1].index_fill_(0, last, 0)

    def snapshot(self) -> HistorySnapshot:
        """Return all that steps and updates change."""
        return HistorySnapshot(
            self.counts(),
            self.norms(),
            self.records(),
            self._recorded_from,
            list(self._steps),
            LastStep(self._found_inf, self._graph_step, self._is_replayed),
        )

    def restore(self, snapshot: HistorySnapshot) -> None:
        """Undo all changes since a snapshot."""
        self.set_counts(snapshot.counts)
        self.set_norms(snapshot.norms)
        self.put_records(snapshot.records)
        self._recorded_from = snapshot.recorded_from
        self._found_inf_copy = None  # of a later step
        self._steps.clear()
        self._steps.extend(snapshot.steps)
        self.put_last_step(snapshot.last_step)

    def put_last_step(self, step: LastStep) -> None:
        """Set the record: to an earlier one after a capture, or to a graph's after its replay."""
        self._found_inf, self._graph_step, self._is_replayed = step

    def step_skipped(self) -> Tensor:
        """Return a flag on the device: True if the last step was skipped."""
        return torch.tensor(False) if self._found_inf is None else self._found_inf != 0

    def was_skipped(self) -> bool:
        """Return True if the last step was skipped; the host waits for that step's flag."""
        if self._found_inf is None:
            return False
        if self._is_replayed:  # replays change the flag unnoticed
            return bool(self._found_inf.item() != 0)
        if self._found_inf_copy is None:
            self._found_inf_copy = HostCopy()
            self._found_inf_copy.send(self._found_inf)
        flag = self._found_inf_copy.wait()
        assert flag is not None
        return bool(flag.item() != 0)

    def consecutive_skips(self) -> int:
        """Return the number of overflows in a row at the last update that the host has received.

        Do not call this during a capture: each replay of the graph would copy to the host.
        """
        if self._counters is None or not self._counters.is_cuda:
            return self.counts()[1]
        arrived = self._counters_copy.latest()
        if arrived is not None:
            self._consecutive_skips = int(arrived[1].item())
        # Send no new copy while one is on its way, or none would ever arrive.
        if arrived is not None or self._counters_copy.is_unsent():
            self._counters_copy.send(self._counters)
        return self._consecutive_skips

    @eager_only
    def raise_if_collapsed(self, limit: int) -> None:
        """Raise ScaleCollapseError if at least `limit` steps in a row overflowed."""
        if is_capturing():  # no step is taken during a capture
            return
        skips = self.consecutive_skips()
        if skips >= limit:
            raise ScaleCollapseError(
                f"{skips} steps in a row overflowed (max_consecutive_skips={limit}): the "
                "gradients are not finite at any scale that was tried. "
                "GradScaler.overflow_report(model) names the parameters"
            )

    def records(self) -> list[ScaleRecord]:
        """Return the records of the history, oldest first."""
        if self._records is None or self._counters is None:
            return list(self._first_records)
        copied = torch.cat([self._records.flatten().double(), self._counters.double()]).tolist()
        rows = [copied[3 * i : 3 * i + 3] for i in range(self.length)]
        updates = int(copied[-1])
        oldest = max(self._recorded_from, updates - self.length)
        numbers = (rows[i % self.length] for i in range(oldest, updates))
        return [ScaleRecord(scale, bool(skipped), norm) for scale, skipped, norm in numbers]

    def copy_to_host(self) -> "ScalerHistory":
        """Return a copy for pickle and deepcopy, without the parameters of the last steps."""
        copied = ScalerHistory(self.counts(), self.length, self.norms())
        copied.put_records(self.records())
        copied._found_inf = torch.tensor(float(self.step_skipped().item()), device="cpu")
        return copied

    def offenders(self) -> set[int]:
        """Return the ids of parameters with non-finite gradients in the last skipped step known."""
        steps = [*self._steps, *([] if self._graph_step is None else [self._graph_step])]
        for found_inf, inspection in reversed(steps):
            if inspection is not None and found_inf.item() != 0:
                norms = [norm for norms in inspection.norms for norm in norms.tolist()]
                ids = [one if isinstance(one, int) else id(one()) for one in inspection.params]
                pairs = zip(ids, norms, strict=True)
                return {param for param, norm in pairs if not math.isfinite(norm)}
        return set()
