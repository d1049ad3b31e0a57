"""The record of a training step: its phases, and when the memory of each tensor was live."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"


class Kind:
    """The categories of allocations."""

    PARAMETERS = "parameters"
    COPIES = "copies of weights"  # of autocast
    MASTERS = "masters"
    GRADIENTS = "gradients"
    MOMENTS = "moments"
    AVERAGES = "averages"
    BUFFERS = "buffers"
    ACTIVATIONS = "activations"  # kept from forward until backward
    LOSS = "loss workspace"
    TEMPORARIES = "temporaries"
    DATA = "data"  # of the program, for example a batch


KINDS = [kind for name, kind in vars(Kind).items() if name.isupper()]


@dataclass
class Allocation:
    """The memory of a tensor and of its views, from the moment `born` until `died`."""

    bytes: int
    shape: torch.Size  # of the first tensor that was seen in it, as `dtype`
    dtype: torch.dtype
    born: int
    died: int | None = None  # None: not before the end of the record
    kind: str = ""  # "": ACTIVATIONS or TEMPORARIES, which its end decides
    phase: str = FORWARD  # in which it was born, as `operator` and `module`
    operator: str = ""
    module: str = ""  # name of the innermost module; "" outside modules
    output_of: str = ""  # name of the outermost module that returned it
    inputs_of: set[str] = field(default_factory=set)  # names of the modules that took it
    is_trained: bool = False  # True for a parameter of an optimizer
    used: int | None = None  # the moment of its first use in a backward pass
    is_sent: bool = False  # True if the program has moved the tensor to a device
    is_unknown: bool = False  # True for integers and bools that follow from floats, so zeros here


@dataclass
class Record:
    """All allocations that were live at some moment from `begin` to `end`."""

    allocations: list[Allocation]
    phases: list[tuple[int, str]]  # the moments at which phases begin
    blocks: list[str]  # names of the model's repeated modules, for example layers
    operations: Counter[str]  # floating-point operations of forward, by module
    begin: int
    end: int
    for_gpu: bool  # True if it is about a GPU, wherever it was recorded
    replacement: str  # the class of ampfuse that has the optimizer's arithmetic, or ""
    unknown: list[str]  # lines of the program whose results have shapes that depend on numbers

    def phase_at(self, moment: int) -> str:
        """Return the phase at a moment."""
        return next((phase for at, phase in reversed(self.phases) if at <= moment), FORWARD)

    def backward_after(self, moment: int) -> int | None:
        """Return the moment at which the next backward pass begins."""
        return next((at for at, phase in self.phases if phase == BACKWARD and at > moment), None)

    def is_saved(self, one: Allocation) -> bool:
        """Return True if an allocation was made in forward and is still live in backward."""
        begin = self.backward_after(one.born)
        return one.phase == FORWARD and begin is not None and (one.died or self.end + 1) > begin

    def kind_of(self, one: Allocation) -> str:
        """Return the category of an allocation."""
        return one.kind or (Kind.ACTIVATIONS if self.is_saved(one) else Kind.TEMPORARIES)

    def peak(self) -> tuple[int, int]:
        """Return the most bytes that are live at a time, and the moment."""
        deltas: Counter[int] = Counter()
        for one in self.allocations:
            born = max(one.born, self.begin)
            deltas[born] += one.bytes
            if one.died is not None:
                deltas[max(one.died, born)] -= one.bytes
        live = peak = at = 0
        for moment in sorted(deltas):
            live += deltas[moment]
            if live > peak:
                peak, at = live, moment
        return peak, at

    def live_at(self, moment: int) -> list[Allocation]:
        """Return the allocations that are live at a moment."""
        return [
            one
            for one in self.allocations
            if max(one.born, self.begin) <= moment and (one.died is None or one.died > moment)
        ]


def is_within(name: str, blocks: Iterable[str]) -> bool:
    """Return True if a module is one of the blocks, or inside one of them."""
    return any(name == block or name.startswith(f"{block}.") for block in blocks)
