"""Loss-scale policies of other libraries, in plain Python without ampfuse."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass


def as_float32(x: float) -> float:
    """Return the nearest float32, or infinity if `x` is out of range."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]  # type: ignore[no-any-return]
    except OverflowError:
        return math.copysign(math.inf, x)


@dataclass
class Policy:
    """Parameters of the references."""

    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 3
    min_scale: float = -math.inf
    hysteresis: int = 1


def torch_scales(scale: float, flags: list[bool], policy: Policy) -> list[float]:
    """Return the scales of torch.amp: no hysteresis, no smallest scale."""
    tracker, scales = 0, []
    for overflow in flags:
        if overflow:
            scale, tracker = as_float32(scale * policy.backoff_factor), 0
        else:
            tracker += 1
            if tracker == policy.growth_interval:
                grown = as_float32(scale * policy.growth_factor)
                scale = grown if math.isfinite(grown) else scale
                tracker = 0
        scales.append(scale)
    return scales


def megatron_scales(scale: float, flags: list[bool], policy: Policy) -> list[float]:
    """Return the scales of Megatron-LM: overflows use up the hysteresis, growth restores it."""
    growth_tracker, hysteresis_tracker, scales = 0, policy.hysteresis, []
    for overflow in flags:
        if overflow:
            growth_tracker = 0
            hysteresis_tracker -= 1
            if hysteresis_tracker <= 0:
                scale = max(as_float32(scale * policy.backoff_factor), policy.min_scale)
        else:
            growth_tracker += 1
            if growth_tracker == policy.growth_interval:
                growth_tracker, hysteresis_tracker = 0, policy.hysteresis
                scale = as_float32(scale * policy.growth_factor)
        scales.append(scale)
    return scales


def apex_scales(scale: float, flags: list[bool], policy: Policy) -> list[float]:
    """Return the scales of apex: overflows use up the hysteresis, a clean step restores it."""
    growth_tracker, hysteresis_tracker, scales = 0, policy.hysteresis, []
    for overflow in flags:
        if overflow:
            hysteresis_tracker -= 1
            growth_tracker = 0
            if hysteresis_tracker <= 0:
                scale = as_float32(scale * policy.backoff_factor)
        else:
            growth_tracker += 1
            if growth_tracker == policy.growth_interval:
                grown = as_float32(scale * policy.growth_factor)
                scale = grown if math.isfinite(grown) else scale
                growth_tracker = 0
            hysteresis_tracker = policy.hysteresis
        scales.append(scale)
    return scales


def deepspeed_scales(
    scale: float, flags: list[bool], policy: Policy, *, consecutive: bool
) -> list[float]:
    """Return the scales of DeepSpeed.

    It counts steps since the last overflow, and its hysteresis does not fall below 1.
    """
    last_overflow, hysteresis, scales = -1, policy.hysteresis, []
    for step, overflow in enumerate(flags):
        if overflow:
            if hysteresis == 1:
                scale = max(as_float32(scale * policy.backoff_factor), policy.min_scale)
            else:
                hysteresis -= 1
            last_overflow = step
        else:
            if consecutive:
                hysteresis = policy.hysteresis
            if (step - last_overflow) % policy.growth_interval == 0:
                hysteresis = policy.hysteresis
                scale = as_float32(scale * policy.growth_factor)
        scales.append(scale)
    return scales


Reference = Callable[[float, list[bool], Policy], list[float]]

# For each of ampfuse's refill policies, the libraries that have it.
REFERENCES: dict[str, list[tuple[str, Reference]]] = {
    "growth": [
        ("Megatron-LM", megatron_scales),
        ("DeepSpeed", lambda *given: deepspeed_scales(*given, consecutive=False)),
    ],
    "clean_step": [
        ("apex", apex_scales),
        ("DeepSpeed", lambda *given: deepspeed_scales(*given, consecutive=True)),
    ],
}
