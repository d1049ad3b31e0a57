"""The options of a loss scale: types are checked here, and most ranges by the op."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ampfuse import ops
from ampfuse._arguments import checked_count, checked_number, described, is_flag

FLOAT32_MIN, FLOAT32_MAX = 2.0**-149, torch.finfo(torch.float32).max


def checked_scale(name: str, value: Any) -> float:
    """Convert a number; raise unless it is finite and above 0 as a float32."""
    number = checked_number(name, value)
    if not FLOAT32_MIN <= number <= FLOAT32_MAX:
        raise ValueError(f"{name}: expected a finite float above 0, got {value}")
    return number


@dataclass(frozen=True)
class Policy:
    """The options that torch's scaler lacks."""

    min_scale: float | None = None
    max_scale: float | None = None
    hysteresis: int = 1
    hysteresis_refill: str = "growth"
    dynamic: bool = True
    skip_outliers: float | None = None

    def check_process_group(self, process_group: Any) -> None:
        """Raise if ranks with different gradients cannot have this policy."""
        if self.skip_outliers is not None and process_group is not None:
            raise ValueError(
                "skip_outliers: expected None with a process_group, whose ranks have different "
                "gradients"
            )

    def __post_init__(self) -> None:
        for name in ("min_scale", "max_scale", "skip_outliers"):
            limit = getattr(self, name)
            object.__setattr__(self, name, None if limit is None else checked_number(name, limit))
        hysteresis = checked_count("hysteresis", self.hysteresis, least=1)
        object.__setattr__(self, "hysteresis", hysteresis)
        if not isinstance(self.hysteresis_refill, str):
            kind = type(self.hysteresis_refill).__name__
            raise TypeError(f"hysteresis_refill: expected a str, got {kind}")
        if not is_flag(self.dynamic):
            raise TypeError(f"dynamic: expected a bool, got {described(self.dynamic)}")
        object.__setattr__(self, "dynamic", bool(self.dynamic))

    def check_initial(self, init_scale: float) -> None:
        """Raise if the initial scale is outside the limits."""
        low, high = self.min_scale, self.max_scale
        if low is not None and init_scale < low:
            raise ValueError(f"init_scale: expected at least min_scale={low}, got {init_scale}")
        if high is not None and init_scale > high:
            raise ValueError(f"init_scale: expected at most max_scale={high}, got {init_scale}")

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options by name. The op and state dicts use the same names."""
        return {name: getattr(self, name) for name in self.__match_args__}


def torchs_options(
    policy: Policy,
    growth_factor: Any = 2.0,
    backoff_factor: Any = 0.5,
    growth_interval: Any = 2000,
) -> tuple[float, float, int]:
    """Convert the options that torch also has; raise if one of these or of `policy` is invalid."""
    growth = checked_number("growth_factor", growth_factor)
    backoff = checked_number("backoff_factor", backoff_factor)
    interval = checked_count("growth_interval", growth_interval, least=1)
    nothing = torch.empty((), dtype=torch.float32, device="meta")
    try:
        ops.update_scale(
            nothing,
            nothing.int(),
            torch.empty(3, dtype=torch.int64, device="meta"),
            [],
            growth_factor=growth,
            backoff_factor=backoff,
            growth_interval=interval,
            **policy.options,
        )
    except ValueError as error:
        raise ValueError(str(error).splitlines()[0].removeprefix("update_scale: ")) from None
    return growth, backoff, interval


def checked_device(device: Any, enabled: bool) -> str:
    """Return the name of a device; raise if torch does not know that of an enabled scaler."""
    if isinstance(device, torch.device):
        return device.type
    if not isinstance(device, str):
        raise TypeError(f"device: expected a str like 'cuda', got {device!r}")
    try:
        torch.device(device if enabled else "cpu")
    except RuntimeError:
        raise ValueError(
            f"device: expected a device of torch, 'cuda' or 'cpu', got {device!r}"
        ) from None
    return device
