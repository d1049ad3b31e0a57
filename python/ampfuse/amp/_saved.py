"""A scaler's saved state, which is checked as a whole before any of it is loaded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ampfuse._arguments import checked_count, checked_known, checked_number
from ampfuse.amp import _policy
from ampfuse.amp._policy import Policy, torchs_options

COUNTERS = ("_hysteresis_tracker", "_consecutive_skips", "_updates")
NORMS = ("_norms", "_norm_mean", "_norm_variance", "_norm_limit")


class Loaded(NamedTuple):
    """The checked entries of a state dict."""

    torchs: dict[str, Any]
    policy: Policy
    counts: list[int]
    norms: list[float]


def loaded(
    state: dict[str, Any], policy: Policy, counts: Sequence[int], norms: Sequence[float]
) -> Loaded:
    """Parse a state dict of our scaler or torch's.

    A state of torch's scaler lacks our options, counters and statistics of norms. What is missing
    is taken from `policy`, `counts` and `norms`.
    """

    def entry(name: str) -> Any:
        if name not in state:
            raise KeyError(
                f"GradScaler's state has no {name!r}; it has {', '.join(sorted(map(str, state)))}. "
                "Is it the state of another object?"
            )
        return state[name]

    scale = checked_number("scale", entry("scale"))
    if not 0 <= scale <= _policy.FLOAT32_MAX:
        raise ValueError(f"scale: expected a finite float, at least 0, got {scale}")
    policy = Policy(**{name: state.get(name, value) for name, value in policy.options.items()})
    given = {name: entry(name) for name in ("growth_factor", "backoff_factor", "growth_interval")}
    tracker = checked_count("_growth_tracker", entry("_growth_tracker"), 0, 2**31 - 1)
    torchs = {
        "scale": scale,
        **dict(zip(given, torchs_options(policy, **given), strict=True)),
        "_growth_tracker": tracker,
    }
    counters = zip(COUNTERS, counts, strict=True)
    ours = [checked_count(name, state.get(name, here), least=0) for name, here in counters]
    pairs = zip(NORMS, norms, strict=True)
    statistics = [checked_known(name, state.get(name, here)) for name, here in pairs]
    return Loaded(torchs, policy, ours, statistics)


def check_pickled(state: dict[str, Any]) -> None:
    """Raise unless this is the pickled state of a scaler."""
    needed = {"_enabled", "_device"}
    if state.get("_enabled"):
        needed |= {"_init_scale", "_init_growth_tracker", "policy", "_history", "_inspections"}
    missing = needed - state.keys()
    if missing:
        lacking = ", ".join(sorted(missing))
        raise ValueError(f"GradScaler: expected a pickled scaler, got one without {lacking}")
