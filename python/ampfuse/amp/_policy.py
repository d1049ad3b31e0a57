"""Checks of the options that control the scale: constructors raise, so that updates need not."""

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOAT32_MIN, FLOAT32_MAX = 2.0**-149, torch.finfo(torch.float32).max
REFILLS = ("growth", "clean_step")


def positive(name: str, value: Any) -> float:
    """Return `value` as a finite float above 0, or raise."""
    number = real(name, value)
    if not 0 < number < math.inf:
        raise ValueError(f"{name}: expected a finite number above 0, got {value}")
    return number


def real(name: str, value: Any) -> float:
    """Return `value` as a float, or raise. Some programs save it as a tensor of one element."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    return float(value)


def count(name: str, value: Any, least: int, most: int = 2**62) -> int:
    """Return `value` as an int from `least` to `most`, or raise."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    if number > most:
        raise ValueError(f"{name}: expected at most {most}, got {number}")
    return number


def scale(name: str, value: Any) -> float:
    """Return `value` as a positive float in the range of float32, or raise."""
    number = real(name, value)
    if not FLOAT32_MIN <= number <= FLOAT32_MAX:
        raise ValueError(f"{name}: expected a finite float above 0, got {value}")
    return number


def growth_factor(value: Any) -> float:
    """Return a factor of at least 1. torch's constructor refuses 1; its setter and state do not."""
    number = positive("growth_factor", value)
    if number < 1:
        raise ValueError(f"growth_factor: expected at least 1, got {value}")
    return number


def backoff_factor(value: Any) -> float:
    """Return a factor of at most 1. torch's constructor refuses 1; its setter and state do not."""
    number = positive("backoff_factor", value)
    if number > 1:
        raise ValueError(f"backoff_factor: expected at most 1, got {value}")
    return number


def growth_interval(value: Any) -> int:
    return count("growth_interval", value, least=1)


@dataclass(frozen=True)
class Policy:
    """The options of the scale that torch's scaler does not have."""

    min_scale: float | None
    max_scale: float | None
    hysteresis: int
    hysteresis_refill: str
    dynamic: bool

    def __post_init__(self) -> None:
        for name in ("min_scale", "max_scale"):
            limit = getattr(self, name)
            if limit is None:
                continue
            if not real(name, limit) > 0:
                raise ValueError(f"{name}: expected None or more than 0, got {limit}")
            object.__setattr__(self, name, real(name, limit))  # from tensors and numpy, too
        low, high = self.min_scale, self.max_scale
        if low is not None and high is not None and low > high:
            raise ValueError(f"max_scale: expected at least min_scale, got {high} and {low}")
        object.__setattr__(self, "hysteresis", count("hysteresis", self.hysteresis, least=1))
        if self.hysteresis_refill not in REFILLS:
            raise ValueError(
                f"hysteresis_refill: expected one of {REFILLS}, got {self.hysteresis_refill!r}"
            )
        if not isinstance(self.dynamic, bool):
            raise TypeError(f"dynamic: expected a bool, got {type(self.dynamic).__name__}")

    def check_first(self, init_scale: float) -> None:
        """Raise if a new scale is not between the limits."""
        low, high = self.min_scale or init_scale, self.max_scale or init_scale
        if not low <= init_scale <= high:
            raise ValueError(
                f"init_scale: expected a number from min_scale to max_scale, got {init_scale}"
            )

    @property
    def options(self) -> dict[str, Any]:
        """The options by the names that the op and state dicts use."""
        return {name: getattr(self, name) for name in self.__match_args__}

    def updated(self, saved: dict[str, Any]) -> "Policy":
        """Return the policy of a state dict; options that it lacks are taken from this policy."""
        return Policy(**{name: saved.get(name, value) for name, value in self.options.items()})
