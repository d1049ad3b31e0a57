"""Loss scales for `update_scale`, and policies of other libraries, in Python without ampfuse."""

import math
import struct
from dataclasses import dataclass

import torch
from ampfuse.ops import update_scale

OPTIONS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}


class Scale:
    """A loss scale with its growth tracker and counters, and with a history or statistics."""

    def __init__(self, device, scale=1024.0, hysteresis=1, history=0, statistics=False):
        self.device = device
        self.scale = torch.tensor(scale, device=device)
        self.growth_tracker = torch.tensor(0, dtype=torch.int32, device=device)
        self.counters = torch.tensor([hysteresis, 0, 0], device=device)
        self.history = torch.zeros(history, 3, device=device) if history else None
        no_norms = torch.tensor([0.0, 0.0, 0.0, math.inf], dtype=torch.float64, device=device)
        self.norms = no_norms if statistics else None

    def arguments(self, *flags, norm=None, **options):
        """Return the arguments of an update with these flags."""
        return {
            "scale": self.scale,
            "growth_tracker": self.growth_tracker,
            "counters": self.counters,
            "found_infs": [torch.tensor(float(flag), device=self.device) for flag in flags],
            "history": self.history,
            "norm": None if norm is None else torch.tensor(norm, device=self.device),
            "norms": self.norms,
            **OPTIONS | options,
        }

    def update(self, *flags, norm=None, **options):
        """Return the scale after a step with these flags."""
        update_scale(**self.arguments(*flags, norm=norm, **options))
        return self.scale.item()


def as_float32(x):
    """Return the nearest float32, or infinity if `x` is out of range."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
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


def megatron_scales(scale, flags, policy):
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


def apex_scales(scale, flags, policy):
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


def deepspeed_scales(scale, flags, policy, *, consecutive):
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


# For each of ampfuse's refill policies, the libraries that have it.
REFERENCES = {
    "growth": [
        ("Megatron-LM", megatron_scales),
        ("DeepSpeed", lambda *given: deepspeed_scales(*given, consecutive=False)),
    ],
    "clean_step": [
        ("apex", apex_scales),
        ("DeepSpeed", lambda *given: deepspeed_scales(*given, consecutive=True)),
    ],
}
