"""The options of a scaler that say how its scale moves, beyond torch's."""

from dataclasses import asdict, dataclass, fields
from typing import Any

REFILLS = ("growth", "clean_step", "consecutive")


@dataclass
class Policy:
    """Checked here, so that a scaler is refused and not its first update."""

    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    hysteresis_refill: str
    dynamic: bool

    def __post_init__(self) -> None:
        low, high = self.min_scale, self.max_scale
        for name, limit in (("min_scale", low), ("max_scale", high)):
            if limit is not None and not limit > 0:
                raise ValueError(f"{name}: expected None or more than 0, got {limit}")
        if low is not None and high is not None and low > high:
            raise ValueError(f"max_scale: expected at least min_scale, got {high} and {low}")
        if isinstance(self.hysteresis, bool) or not isinstance(self.hysteresis, int):
            raise TypeError(f"hysteresis: expected an int, got {type(self.hysteresis).__name__}")
        if self.hysteresis < 1:
            raise ValueError(f"hysteresis: expected at least 1, got {self.hysteresis}")
        if self.hysteresis_refill not in REFILLS:
            raise ValueError(
                f"hysteresis_refill: expected one of {REFILLS}, got {self.hysteresis_refill!r}"
            )

    def as_options(self) -> dict[str, Any]:
        """As the op and state dictionaries have them."""
        return asdict(self)

    def updated(self, saved: dict[str, Any]) -> "Policy":
        """What a state dictionary says, and this where it says nothing."""
        names = [field.name for field in fields(self)]
        return Policy(**self.as_options() | {name: saved[name] for name in names if name in saved})
