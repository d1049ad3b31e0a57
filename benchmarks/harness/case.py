"""What a benchmark hands to the harness: cases, each with the providers that compete in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

OURS = "ampfuse"  # the provider every ratio is taken against

CeilingKind = Literal["read", "copy", "update"]
# Measured: GB/s of each kind, and GFLOP/s of a product in each dtype that cases multiply in.
Ceilings = Mapping[CeilingKind | torch.dtype, float]

# Two providers may round a 16-bit result at different places: a bfloat16 rounding is 2^-9, and
# norm, factor and product make a few of them.
AGREEMENT = 2**-6


@dataclass(frozen=True)
class Settings:
    """What the command line chose."""

    device: torch.device
    quick: bool
    rounds: int
    threads: int
    out: Path
    pattern: str


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes an operation can move: each input read once, each output written once.

    Every provider is rated against this floor, not against what it happens to move: an extra pass
    over memory shows as fewer GB/s. `against` names the ceiling, measured in the same run, that the
    access pattern could reach: a plain read, a copy to other memory, or an update in place (which,
    on a CPU, spares the read of the destination's cache lines that a copy pays for).
    """

    read: int
    written: int
    against: CeilingKind

    @property
    def total(self) -> int:
        """Bytes read and bytes written."""
        return self.read + self.written


@dataclass(frozen=True)
class Products:
    """What an operation multiplies, where that and not memory decides how long it takes.

    `total` counts multiplications and additions of the fewest products there can be: what a
    provider multiplies besides shows as fewer FLOP/s. The ceiling is one large product in this
    dtype, measured in the same run.
    """

    total: int
    against: torch.dtype


@dataclass(frozen=True)
class Provider:
    """One competitor in a case.

    `run` is timed. `restore` puts back what `run` overwrote, and is not. `mutates` lists the
    tensors `run` writes to: their values, and what `run` returns when it is a tensor or a tuple of
    them, must agree with those of the first provider of the case, up to the relative `agreement`,
    and up to `slack` times the largest of them where terms cancel that providers round differently.
    `moves` is what its passes read and write, in bytes per element, where that is known. `skipped`,
    when set, says why it does not run.
    """

    name: str
    run: Callable[[], object]
    restore: Callable[[], object] = lambda: None
    mutates: Sequence[torch.Tensor] = ()
    skipped: str = ""
    moves: float | None = None
    agreement: float = AGREEMENT
    slack: float = 0.0


@dataclass(frozen=True)
class Case:
    """One operation on one list of shapes in one dtype.

    `memory` is what `setup` allocates, in bytes; `setup` makes the inputs and the providers, the
    trusted reference first. `quick` keeps the case in a `--quick` run. `weighs_memory` has the
    memory measured that a run holds at its peak, in a run of its own.
    """

    operation: str
    shape: str
    dtype: torch.dtype
    elements: int
    traffic: Traffic | Products
    memory: int
    setup: Callable[[Settings], Sequence[Provider]]
    quick: bool = False
    weighs_memory: bool = False

    @property
    def dtype_name(self) -> str:
        """The dtype as torch names it, without the prefix."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def id(self) -> str:
        """What `--cases` is matched against."""
        return f"{self.operation}/{self.shape}/{self.dtype_name}"
