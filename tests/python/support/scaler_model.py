"""A model of GradScaler in plain Python, without ampfuse: torch's states and ampfuse's policy.

An optimizer is only a list of gradients, numbers or None, and a count of its steps.
"""

import math
from dataclasses import dataclass, field

from scale_reference import as_float32


@dataclass
class Expected:
    """An expected exception, and words of its message."""

    error: type[Exception]
    words: str


NO_SCALE = Expected(AssertionError, "_scale is None")


@dataclass
class Optimizer:
    """The gradients of an optimizer, the result of their inspection, and the count of steps."""

    grads: list[float | None]
    takes_tensors: bool
    stage: str = "ready"  # then "unscaled", then "stepped", until an update
    overflow: bool | None = None  # None: gradients were not inspected, or there were none
    steps: int = 0


@dataclass
class Scaler:
    """The specification of GradScaler."""

    optimizers: list[Optimizer]
    init_scale: float
    growth_interval: int
    hysteresis: int
    min_scale: float
    scale: float | None = None
    growth_tracker: int = 0
    hysteresis_tracker: int = field(init=False)
    skips: int = 0

    def __post_init__(self):
        self.hysteresis_tracker = self.hysteresis

    def get_scale(self):
        """Return the scale, also before its first use."""
        return self.init_scale if self.scale is None else self.scale

    def scale_(self):
        """Create the scale if this is its first use, and return it."""
        self.scale = self.get_scale()
        return self.scale

    def unscale_(self, optimizer):
        """Multiply all gradients by the inverse of the scale, or return the expected error."""
        if self.scale is None:
            return NO_SCALE
        if optimizer.stage == "unscaled":
            return Expected(RuntimeError, "unscale_() has already been called")
        if optimizer.stage == "stepped":
            return Expected(RuntimeError, "unscale_() is being called after step()")
        inverse = as_float32(1 / self.scale)
        optimizer.grads = [None if g is None else as_float32(g * inverse) for g in optimizer.grads]
        self.look(optimizer)
        optimizer.stage = "unscaled"
        return None

    def look(self, optimizer):
        """Inspect the gradients for overflow; without gradients the result is None."""
        present = [g for g in optimizer.grads if g is not None]
        optimizer.overflow = any(not math.isfinite(g) for g in present) if present else None

    def step(self, optimizer):
        """Count the step unless it is skipped, or return the expected error."""
        if self.scale is None:
            return NO_SCALE
        if optimizer.stage == "stepped":
            return Expected(RuntimeError, "step() has already been called")
        if optimizer.stage == "ready":
            if optimizer.takes_tensors:
                self.look(optimizer)
            else:
                self.unscale_(optimizer)
        if optimizer.overflow is None and not optimizer.takes_tensors:
            return Expected(AssertionError, "No inf checks were recorded for this optimizer")
        # overflow is None if unscale_() found no gradients. Later ones are not inspected.
        if not optimizer.overflow and any(g is not None for g in optimizer.grads):
            optimizer.steps += 1
        optimizer.stage = "stepped"
        return None

    def update(self):
        """Apply the policy, or return the expected error."""
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
        for optimizer in self.optimizers:
            optimizer.stage, optimizer.overflow = "ready", None
        return None

    def is_between_updates(self):
        """Return True if an optimizer was unscaled or stepped since the last update."""
        return any(o.stage != "ready" for o in self.optimizers)
