"""Parameters that something else than their optimizer writes: models loaded, averaged, masked."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor

from ampfuse import _C
from ampfuse._capture import is_capturing
from ampfuse._mirror import Mirror
from ampfuse._warning import warn_caller
from ampfuse.optim._columns import Columns
from ampfuse.optim._state import adopt_param


@dataclass(frozen=True)
class Marks:
    """What writes to the tensors of one call of the op leave behind."""

    params: tuple[int, int]  # versions, summed, and a hash of the addresses
    steps: tuple[int, int]
    columns: Columns = field(compare=False)
    first_version: int = field(compare=False)

    @classmethod
    def of(cls, columns: Columns) -> "Marks":
        """As they are now."""
        params, steps = _C.writes(columns.params), _C.writes(columns.state_steps)
        return cls(params, steps, columns, columns.params[0]._version)

    def moved_by_a_step(self) -> "Marks":
        """As they are after a step, which has written all of the tensors equally often."""
        times = self.columns.params[0]._version - self.first_version
        params = (self.params[0] + times * len(self.columns.params), self.params[1])
        steps = (self.steps[0] + times * len(self.columns.state_steps), self.steps[1])
        return replace(self, params=params, steps=steps)


Writes = list[Marks]


class WrittenParams:
    """Has float32 masters take over what was written into their parameters.

    A write between two steps shows in the parameter's version counter or in its address, and then
    every element is compared with its master. The step itself compares too (`adopt_params` of
    `ops.fused_adam`): all elements on a CPU, some on a GPU. So what goes unnoticed is a write on a
    GPU that neither shows nor reaches an element which the step compares.
    """

    def __init__(self) -> None:
        self._before_step: Writes | None = None
        self._after_step: Writes | None = None
        self._on_its_way: Mirror | None = None  # whether anything was written over
        self._has_warned = False

    def note(self, columns: list[list[Columns]]) -> None:
        """Take the parameters as they are now for those that the masters belong to."""
        self._after_step = writes(columns)

    def note_step(self) -> None:
        """Take the writes of the step that was just taken for the optimizer's own."""
        self._after_step = None
        if self._before_step is not None:
            self._after_step = [marks.moved_by_a_step() for marks in self._before_step]

    def forget(self) -> None:
        """Know of no earlier step."""
        self._after_step = None

    def adopt(self, columns: list[list[Columns]]) -> None:
        """To be called before a step."""
        self._before_step = writes(columns)
        if is_capturing():
            return
        if have_changed(self._after_step, self._before_step):
            self._adopt(columns)
        if self._on_its_way is not None:
            self._warn(self._on_its_way.latest())

    def _adopt(self, columns: list[list[Columns]]) -> None:
        flags = [
            adopt_param(param, master)
            for part in with_float_masters(columns)
            for param, master in zip(part.params, part.masters, strict=True)
        ]
        if not self._has_warned:
            self._on_its_way = Mirror()
            self._on_its_way.send(torch.stack([flag.to(flags[0].device) for flag in flags]).any())

    def _warn(self, was_written_over: Tensor | None) -> None:
        if was_written_over is None:
            return
        self._on_its_way = None
        if was_written_over.item():
            self._has_warned = True
            warn_caller(
                "parameters were written by something else than the optimizer since its last step. "
                "Their float32 masters have taken over what was written, which has no more bits "
                "than the parameters. After loading a model call "
                "optimizer.sync_masters_from_model(). This warning is given once"
            )


def with_float_masters(columns: list[list[Columns]]) -> Iterator[Columns]:
    """Remainders are left out: a parameter that has one is itself the upper half of its master."""
    for part in chain.from_iterable(columns):
        if part.masters and part.masters[0].dtype == torch.float32:
            yield part


def have_changed(before: Writes | None, now: Writes | None) -> bool:
    """Whether parameters were written, and not by a step, which moves the counters too.

    Compiled steps are taken unseen.
    """
    if before is None or now is None or len(before) != len(now):
        return False
    return before != now and [marks.steps for marks in before] == [marks.steps for marks in now]


def writes(columns: list[list[Columns]]) -> Writes | None:
    """How often the parameters with masters and their step counters were written, and where they
    are. None where that cannot be known: tensors made in inference mode do not count writes.
    """
    try:
        return [Marks.of(part) for part in with_float_masters(columns)]
    except RuntimeError:
        return None
