"""The snapshot of a scaler, for steps that are tried, captured and replayed."""

from typing import Any

from ampfuse.amp._history import HistorySnapshot


class ScalerSnapshot:
    """Copies of what steps and updates change in a scaler, which must be enabled."""

    def __init__(self, scaler: Any) -> None:
        self._scale = scaler._live_scale().clone()
        self._growth_tracker = scaler._growth_tracker.clone()
        self.history: HistorySnapshot = scaler._history.snapshot()
        states = scaler._per_optimizer_states
        self._per_optimizer_states = {key: dict(state) for key, state in states.items()}
        self._inspections = dict(scaler._inspections)

    def put_back(self, scaler: Any) -> None:
        """Undo all changes since the snapshot. Tensors are written in place."""
        scaler._scale.copy_(self._scale)
        scaler._growth_tracker.copy_(self._growth_tracker)
        scaler._history.restore(self.history)
        states = self._per_optimizer_states
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update({key: dict(state) for key, state in states.items()})
        scaler._inspections = dict(self._inspections)
