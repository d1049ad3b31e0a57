"""What a scaler shall do, in plain Python without ampfuse: the states of torch's, our policy.

An optimizer is a list of gradients here, numbers or None; stepping one is its caller's business.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from scale_reference import as_float32


class Stage(Enum):
    """Of one optimizer between two updates."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


@dataclass
class Expected:
    """An exception and words of its message."""

    error: type[Exception]
    words: str


NO_SCALE = Expected(AssertionError, "_scale is None")


@dataclass
class Optimizer:
    """Its gradients, what was found in them, and how often it has stepped."""

    grads: list[float | None]
    takes_tensors: bool
    stage: Stage = Stage.READY
    overflow: bool | None = None  # None: nobody has looked
    steps: int = 0


@dataclass
class Scaler:
    """The specification."""

    optimizers: list[Optimizer]
    init_scale: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    scale: float | None = None
    growth_tracker: int = 0
    hysteresis_tracker: int = field(init=False)
    skips: int = 0

    def __post_init__(self) -> None:
        self.hysteresis_tracker = self.hysteresis

    def get_scale(self) -> float:
        """The scale, also before its first use."""
        return self.init_scale if self.scale is None else self.scale

    def scale_(self) -> float:
        """The first use."""
        self.scale = self.get_scale()
        return self.scale

    def unscale_(self, optimizer: Optimizer) -> Expected | None:
        """All gradients by the inverse, unless that is refused."""
        if self.scale is None:
            return NO_SCALE
        if optimizer.stage is Stage.UNSCALED:
            return Expected(RuntimeError, "unscale_() has already been called")
        if optimizer.stage is Stage.STEPPED:
            return Expected(RuntimeError, "unscale_() is being called after step()")
        inverse = as_float32(1 / self.scale)
        optimizer.grads = [None if g is None else as_float32(g * inverse) for g in optimizer.grads]
        self.look(optimizer)
        optimizer.stage = Stage.UNSCALED
        return None

    def look(self, optimizer: Optimizer) -> None:
        """Nothing is told of an optimizer without gradients."""
        present = [g for g in optimizer.grads if g is not None]
        optimizer.overflow = any(not math.isfinite(g) for g in present) if present else None

    def step(self, optimizer: Optimizer) -> Expected | None:
        """Counts the step, unless it is skipped or refused."""
        if self.scale is None:
            return NO_SCALE
        if optimizer.stage is Stage.STEPPED:
            return Expected(RuntimeError, "step() has already been called")
        if optimizer.stage is Stage.READY:
            if optimizer.takes_tensors:
                self.look(optimizer)
            else:
                self.unscale_(optimizer)
        if optimizer.overflow is None and not optimizer.takes_tensors:
            return Expected(AssertionError, "No inf checks were recorded for this optimizer")
        # None: gradients came after unscale_() had found none, and nobody looks again.
        if not optimizer.overflow and any(g is not None for g in optimizer.grads):
            optimizer.steps += 1
        optimizer.stage = Stage.STEPPED
        return None

    def update(self) -> Expected | None:
        """The policy."""
        if self.scale is None:
            return NO_SCALE
        flags = [o.overflow for o in self.optimizers if o.overflow is not None]
        if not flags:
            return Expected(AssertionError, "No inf checks were recorded prior to update")
        self.skips = self.skips + 1 if any(flags) else 0
        if any(flags):
            self.growth_tracker = 0
            if self.hysteresis_tracker > 1:
                self.hysteresis_tracker -= 1
            else:
                backed_off = as_float32(self.scale * 0.5)
                self.scale = max(backed_off, min(self.scale, self.min_scale))
        else:
            self.growth_tracker += 1
            if self.growth_tracker >= self.growth_interval:
                self.growth_tracker, self.hysteresis_tracker = 0, self.hysteresis
                grown = as_float32(self.scale * 2)
                self.scale = grown if math.isfinite(grown) else self.scale
        self.begin_again()
        return None

    def begin_again(self) -> None:
        """For all optimizers."""
        for optimizer in self.optimizers:
            optimizer.stage, optimizer.overflow = Stage.READY, None

    def is_between_updates(self) -> bool:
        """Whether somebody has been looked at, or stepped, since the last one."""
        return any(o.stage is not Stage.READY for o in self.optimizers)
