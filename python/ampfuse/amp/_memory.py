"""What a scaler remembers on the device: counters, the last updates, the last steps."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ampfuse._capture import is_capturing
from ampfuse._host_copy import HostCopy
from ampfuse.amp._gradients import Inspection

REMEMBERED = 16  # steps that a report can look back


class ScaleCollapseError(RuntimeError):
    """As many steps in a row were skipped as `max_consecutive_skips` says.

    The scale has moved all the same: training may go on.
    """

    __module__ = "ampfuse"  # where users find it


class ScaleRecord(NamedTuple):
    """One update of the scale, as `GradScaler.history` tells it."""

    scale: float
    """The scale that the step was taken with."""
    skipped: bool
    """Whether gradients were not finite."""
    norm: float
    """Of all unscaled gradients; NaN where nobody measured it."""


ScaleRecord.__module__ = "ampfuse"  # where users find it


class LastStep(NamedTuple):
    """What is remembered of it."""

    found_inf: Tensor | None
    graph_step: tuple[Tensor, Inspection | None] | None
    is_replayed: bool


class Memory:
    """Everything but the scale and torch's growth tracker, which are attributes of torch's."""

    def __init__(self, counters: Sequence[int], history: int) -> None:
        self._first_counters = list(counters)
        self.length = history
        self._counters: Tensor | None = None
        self._history: Tensor | None = None
        self._recorded_from = 0  # the first update of which the history knows
        self._found_inf: Tensor | None = None  # of the last step
        self._is_replayed = False  # that step, by a graph, who knows how often
        self._counters_copy = HostCopy()
        self._skips_in_a_row = 0  # that the host knows of
        self._found_inf_copy: HostCopy | None = None  # once somebody has asked
        self._steps: deque[tuple[Tensor, Inspection]] = deque(maxlen=REMEMBERED)
        self._graph_step: tuple[Tensor, Inspection | None] | None = None  # the last one's

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """The counters and the history, which are made where they are first needed."""
        if self._counters is None or self._counters.device != device:
            counts = self.counts()
            self._counters = torch.zeros(len(counts), dtype=torch.int64, device=device)
            self.set_counts(counts)
            self._history = None
            if self.length:
                self._history = torch.zeros(self.length, 3, dtype=torch.float32, device=device)
        return self._counters, self._history

    def counts(self) -> list[int]:
        """Hysteresis left, skips in a row, updates."""
        return self._first_counters if self._counters is None else self._counters.tolist()

    def updates_since_loading(self) -> int:
        """Of which the history knows, or would if it were longer."""
        return self.counts()[2] - self._recorded_from

    def set_counts(self, counts: Sequence[int]) -> None:
        """In place, where they are on a device already. The history begins anew."""
        self._first_counters = list(counts)
        self._counters_copy, self._skips_in_a_row = HostCopy(), counts[1]
        self._recorded_from = counts[2]
        if self._counters is not None:
            for place, count in enumerate(counts):
                self._counters[place].fill_(count)

    def note_step(self, found_inf: Tensor, inspection: Inspection | None) -> None:
        """A step is about to be taken, unless the flag says otherwise."""
        self._found_inf = found_inf
        is_compiled = torch.compiler.is_compiling()
        if is_compiled or is_capturing():
            # Nothing is read: what is compiled would be for what was there.
            self._is_replayed, self._graph_step = True, (found_inf, inspection)
            return
        self._is_replayed, self._graph_step = False, None
        if self._found_inf_copy is not None:
            self._found_inf_copy.send(found_inf)
        if inspection is not None:
            self._steps.append((found_inf, inspection))

    def last_step(self) -> "LastStep":
        """To be put back."""
        return LastStep(self._found_inf, self._graph_step, self._is_replayed)

    def put_last_step(self, step: "LastStep") -> None:
        """As it was: after steps that do not count, or when a graph has been replayed."""
        self._found_inf, self._graph_step, self._is_replayed = step

    def step_skipped(self) -> Tensor:
        """Of the last step, on the device."""
        return torch.tensor(False) if self._found_inf is None else self._found_inf != 0

    def was_skipped(self) -> bool:
        """The same on the host, to which it has been on its way since the step."""
        if self._found_inf is None:
            return False
        if self._is_replayed:  # who knows how often
            return bool(self._found_inf.item() != 0)
        if self._found_inf_copy is None:
            self._found_inf_copy = HostCopy()
            self._found_inf_copy.send(self._found_inf)
        flag = self._found_inf_copy.wait()
        assert flag is not None
        return bool(flag.item() != 0)

    def skips_in_a_row(self) -> int:
        """As of the last update of which the host has heard.

        It does not ask while a CUDA graph is captured, nor does any replay.
        """
        if self._counters is None or not self._counters.is_cuda:
            return self.counts()[1]
        if is_capturing():
            return self._skips_in_a_row
        arrived = self._counters_copy.latest()
        if arrived is not None:
            self._skips_in_a_row = int(arrived[1].item())
        # One that is on its way still is not overtaken, or none would ever arrive.
        if arrived is not None or self._counters_copy.is_idle():
            self._counters_copy.send(self._counters)
        return self._skips_in_a_row

    def raise_if_collapsed(self, limit: int | None) -> None:
        """Where so many steps in a row were skipped."""
        if limit is None:
            return
        skips = self.skips_in_a_row()
        if skips >= limit:
            raise ScaleCollapseError(
                f"{skips} steps in a row were skipped (max_consecutive_skips={limit}): the "
                "gradients are not finite at any scale that was tried. "
                "GradScaler.overflow_report(model) names the parameters"
            )

    def records(self) -> list[ScaleRecord]:
        """Oldest first."""
        if self._history is None or self._counters is None:
            return []
        copied = torch.cat([self._history.flatten().double(), self._counters.double()]).tolist()
        rows = [copied[3 * i : 3 * i + 3] for i in range(self.length)]
        updates = int(copied[-1])
        oldest = max(self._recorded_from, updates - self.length)
        numbers = (rows[i % self.length] for i in range(oldest, updates))
        return [ScaleRecord(scale, bool(skipped), norm) for scale, skipped, norm in numbers]

    def offenders(self) -> list[Tensor]:
        """Parameters whose gradients were not finite in the last skipped step that is known."""
        steps = [*self._steps, *([] if self._graph_step is None else [self._graph_step])]
        for found_inf, inspection in reversed(steps):
            if inspection is not None and found_inf.item() != 0:
                norms = [norm for norms in inspection.norms for norm in norms.tolist()]
                pairs = zip(inspection.params.alive(), norms, strict=True)
                found = [param for param, norm in pairs if not math.isfinite(norm)]
                return [param for param in found if param is not None]
        return []


def names_of(params: Iterable[Tensor], model: torch.nn.Module) -> list[str]:
    """What the model calls them; those that it does not have are left out."""
    names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    return [names[param] for param in dict.fromkeys(params) if param in names]
