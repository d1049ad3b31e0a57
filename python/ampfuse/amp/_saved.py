"""Saves, loads and copies a scaler. All of a state is checked before any of it is loaded."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from ampfuse._arguments import checked_count, checked_known, checked_number
from ampfuse._copies import copied_with_group
from ampfuse.amp import _policy
from ampfuse.amp._history import ScalerHistory
from ampfuse.amp._policy import Policy, torchs_options
from ampfuse.amp._snapshot import ScalerSnapshot
from ampfuse.gradients.inspection import Inspection
from ampfuse.gradients.mistakes import Watch

COUNTERS = ("_hysteresis_tracker", "_consecutive_skips", "_updates")
NORMS = ("_norms", "_norm_mean", "_norm_variance", "_norm_limit")


Self = TypeVar("Self", bound="SavedScaler")


class SavedScaler(TorchGradScaler):
    """Saves, loads and copies a scaler, whose constructor sets these attributes."""

    policy: Policy
    process_group: Any
    max_consecutive_skips: int | None
    allow_no_grads: bool
    _allow_fp16_grads: bool
    _history: ScalerHistory
    _inspections: dict[int, Inspection]
    _watch: Watch

    def state_dict(self) -> dict[str, Any]:
        """Return the state, for example for a checkpoint. The host waits for the numbers.

        Returns:
            torch's five entries, which torch's scaler can load, and further options and counters;
            without the history. It is empty if the scaler is disabled.
        """
        if not self._enabled:
            return {}
        own: dict[str, float] = dict(zip(COUNTERS, self._history.counts(), strict=True))
        with self._watch.unnoticed():
            own |= zip(NORMS, self._history.norms(), strict=True)
            return {**super().state_dict(), **self.policy.options, **own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or torch's. Options that it lacks stay unchanged.

        Nothing is loaded if an entry of torch's is missing or any entry is invalid.

        Args:
            state_dict: The result of `state_dict()` of a scaler that was enabled.

        Raises:
            KeyError: An entry of torch's is missing.
            TypeError: An entry has a wrong type.
            ValueError: An entry is out of range, or `skip_outliers` is set, which a scaler with a
                process group cannot have.
            RuntimeError: The state dict is empty, as that of a disabled scaler is.
        """
        torchs = state_dict
        if self._enabled and state_dict:
            state = loaded(state_dict, self.policy, self._history.counts(), self._history.norms())
            state.policy.check_process_group(self.process_group)
            self.policy, torchs = state.policy, state.torchs
            self._history.set_counts(state.counts)
            self._history.set_norms(state.norms)
            for of_optimizer in self._per_optimizer_states.values():
                of_optimizer["is_loaded"] = True
        super().load_state_dict(torchs)

    def snapshot(self) -> ScalerSnapshot | None:
        """Return all that steps and updates change, in copies; None if the scaler is disabled."""
        return ScalerSnapshot(self) if self._enabled else None

    def restore(self, snapshot: ScalerSnapshot | None) -> None:
        """Undo all changes since a snapshot. Tensors are written in place.

        Args:
            snapshot: The result of `snapshot()`.
        """
        if snapshot is not None:
            snapshot.put_back(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy. Tensors are created again when needed."""
        if not self._enabled:
            return super().__getstate__()
        with self._watch.unnoticed():
            state = super().__getstate__()
            state["_history"] = self._history.copy_to_host()
            state["_inspections"] = {}
            del state["_watch"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state for pickle and deepcopy."""
        for name in ("_policy", "_allow_no_grads"):  # the names in version 0.2.0
            if name in state:
                state[name.removeprefix("_")] = state.pop(name)
        check_pickled(state)
        super().__setstate__(state)
        if self._enabled:
            self._watch = Watch()

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        """Copy the scaler; the copy has the same process group."""
        return copied_with_group(self, memo)


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
