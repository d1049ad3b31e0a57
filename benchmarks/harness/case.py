"""The input of the harness: cases, each with the providers that compete in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

OURS = "ampfuse"  # the provider that `time_over_ampfuse` is relative to

CeilingKind = Literal["read", "copy", "update"]
# Measured rates: GB/s of each kind, and GFLOP/s of a product in each dtype that cases multiply in.
Ceilings = Mapping[CeilingKind | torch.dtype, float]

# Two providers may round a 16-bit result at different points: a bfloat16 rounding is 2^-9, and
# norm, factor and product make a few of them.
AGREEMENT = 2**-6


@dataclass(frozen=True)
class Settings:
    """The parsed command line."""

    device: torch.device
    quick: bool
    rounds: int
    threads: int
    out: Path
    pattern: str


@dataclass(frozen=True)
class Traffic:
    """The fewest bytes an operation can move: each input read once, each output written once.

    Every provider is rated by this floor, not by the bytes that it moves: an extra pass over memory
    shows as fewer GB/s. `against` names the ceiling, measured in the same run, that the access
    pattern could reach: a plain read, a copy to other memory, or an update in place (which, on a
    CPU, saves the read of the destination's cache lines that a copy needs).
    """

    read: int
    written: int
    against: CeilingKind

    @property
    def total(self) -> int:
        """The number of bytes read and written."""
        return self.read + self.written


@dataclass(frozen=True)
class Products:
    """The matrix products of an operation that is limited by them, and not by memory.

    `total` counts the multiplications and additions of the fewest possible products: additional
    products of a provider show as fewer FLOP/s. The ceiling is one large product in this dtype,
    measured in the same run.
    """

    total: int
    against: torch.dtype


@dataclass(frozen=True)
class Provider:
    """One competitor in a case.

    `run` is timed. `restore`, which is not timed, restores what `run` has overwritten. `mutates`
    lists the tensors to which `run` writes. Their values, and a tensor or tuple of tensors that
    `run` returns, must agree with those of the case's first provider: up to the relative
    `agreement`, and up to `slack` times the largest of them if terms cancel that providers round
    differently. `moves` are the bytes per element that its passes read and write, if that is known.
    `held` returns the bytes that it holds between two runs and that count as its memory.
    `skipped` is the reason if the provider does not run.
    """

    name: str
    run: Callable[[], object]
    restore: Callable[[], object] = lambda: None
    mutates: Sequence[torch.Tensor] = ()
    skipped: str = ""
    moves: float | None = None
    held: Callable[[], int] = lambda: 0
    agreement: float = AGREEMENT
    slack: float = 0.0


@dataclass(frozen=True)
class Case:
    """One operation on one list of shapes in one dtype.

    `setup` creates the inputs and the providers, the trusted reference first, and allocates
    `memory` bytes. `quick` keeps the case in a `--quick` run. With `weighs_memory`, the peak memory
    is measured in a separate run.
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
        """The name that `--cases` is matched against."""
        return f"{self.operation}/{self.shape}/{self.dtype_name}"
