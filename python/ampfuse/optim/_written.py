"""Detects writes to parameters by other code than their optimizer: loading, averaging, masks."""

from collections.abc import Iterator
from itertools import chain

import torch

from ampfuse import _C
from ampfuse._graphs import is_capturing
from ampfuse._host_copy import HostCopy
from ampfuse._warning import warn_caller
from ampfuse.gradients.devices import largest
from ampfuse.optim._columns import Columns
from ampfuse.optim._state import adopt_param

Writes = list[tuple[tuple[int, int], tuple[int, int], tuple[int, int]]]
"""For each call of the op, the results of `_C.writes` for parameters, DTensors and step counters.

Each result is the sum of the tensors' version counters, and a hash of their addresses.
"""


class WrittenParams:
    """Makes float32 masters adopt what other code has written to their parameters.

    A write between two eager steps of the same parameters changes a version counter or an address,
    unless it is made through `.data`. After such a change, every element is compared with its
    master. The step itself compares too (`adopt_params` of the operators): all elements on a
    CPU, some on a GPU. So a write goes unnoticed only on a GPU, and only if it changes neither
    counters nor addresses nor any element that the step compares.
    """

    def __init__(self) -> None:
        self._after_step: Writes | None = None
        self._on_its_way: HostCopy | None = None  # sends adopt_param()'s flag
        self._has_warned = False
        self._must_compare = False

    def note_step(self, columns: list[list[Columns]]) -> None:
        """Record the step that was just taken, so that its writes count as the optimizer's own."""
        self._after_step = writes(columns)

    def forget(self) -> None:
        """Forget the last step."""
        self._after_step = None

    def compare(self) -> None:
        """Compare all masters with their parameters before the next step."""
        self._must_compare = True

    def adopt(self, columns: list[list[Columns]]) -> None:
        """Detect and adopt writes since the last step. Call this before a step."""
        if not any(find_float_masters(columns)) or is_capturing():
            return
        self._warn_if_arrived()
        if self._must_compare or have_changed(self._after_step, writes(columns)):
            self._must_compare = False
            self._adopt(columns)
            self._warn_if_arrived()  # on a CPU the flag has arrived

    def _adopt(self, columns: list[list[Columns]]) -> None:
        flags = [
            adopt_param(param, master)
            for one in find_float_masters(columns)
            for param, master in zip(one.params, one.masters, strict=True)
        ]
        # If each step replaced a copy that is on its way, the host might never receive one.
        if flags and not self._has_warned and self._on_its_way is None:
            self._on_its_way = HostCopy()
            self._on_its_way.send(largest(flags))

    def _warn_if_arrived(self) -> None:
        was_written_over = None if self._on_its_way is None else self._on_its_way.latest()
        if was_written_over is None:
            return
        self._on_its_way = None
        if was_written_over.item():
            self._has_warned = True
            warn_caller(
                "parameters were written by code other than the optimizer since its last step. "
                "Their float32 masters were set to the written values, which have no more bits "
                "than the parameters. After loading a model call "
                "optimizer.sync_masters_from_model(). This warning is given once"
            )


def find_float_masters(columns: list[list[Columns]]) -> Iterator[Columns]:
    """Yield columns with float32 masters. A parameter with a remainder is a part of its master."""
    for one in chain.from_iterable(columns):
        if one.masters and one.masters[0].dtype == torch.float32:
            yield one


def have_changed(before: Writes | None, now: Writes | None) -> bool:
    """Return True if parameters were written, but not by a step, which writes the counters too.

    Compiled steps are not recorded, so only the step counters show them.
    """
    if before is None or now is None or before == now:
        return False
    if len(before) != len(now):  # other parameters have gradients now, so versions say nothing
        return True
    return [steps for *_, steps in before] == [steps for *_, steps in now]


def writes(columns: list[list[Columns]]) -> Writes | None:
    """Return the writes to parameters with float32 masters, and to their step counters.

    The result is None if any of them is a tensor of inference mode, which does not count writes.
    """
    try:
        return [
            # A write to a DTensor is counted by it, not by its shard.
            (_C.writes(one.params), _C.writes(one.dtensors), _C.writes(one.state_steps))
            for one in find_float_masters(columns)
        ]
    except RuntimeError:
        return None
