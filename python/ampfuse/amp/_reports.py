"""Reports what a scaler's steps have done: which were skipped, and for which parameters."""

import torch
from torch import Tensor

from ampfuse._warning import warn_caller
from ampfuse.amp._history import ScaleRecord
from ampfuse.amp._saved import SavedScaler


class ReportingScaler(SavedScaler):
    """Reports what has happened, from the history on the device."""

    _has_scaled: bool

    @property
    def step_skipped(self) -> Tensor:
        """A 0-dim bool tensor, on the scale's device after a step: True if it was skipped."""
        return self._history.step_skipped() if self._enabled else torch.tensor(False)

    def was_skipped(self) -> bool:
        """Return True if the last step was skipped. The host waits for the check of that step.

        With several optimizers, this is the step of the one that was stepped last.
        """
        return self._enabled and self._history.was_skipped()

    def history(self) -> list[ScaleRecord]:
        """Return the last updates, oldest first. The host waits for one copy.

        Returns:
            At most `history` records; none if the scaler is disabled or made without `history=`.
        """
        if not self._enabled:
            return []
        if self._history.length == 0:
            warn_caller(
                "history(): this GradScaler remembers no updates; make it with "
                "GradScaler(history=100) to remember the last 100"
            )
        return self._history.records()

    def overflow_report(self, model: torch.nn.Module) -> list[str]:
        """Return the names of the parameters with non-finite gradients in the last skipped step.

        The last 16 steps are searched, or only the last one if it was compiled or captured; the
        list is empty if all of them were taken. So call this if `was_skipped()` returns True. The
        host waits for the result.

        Args:
            model: The model that names the parameters.

        Returns:
            Names as in `model.named_parameters()`.
        """
        if not hasattr(model, "named_parameters"):
            raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if not self._enabled:
            return []
        found = self._history.offenders()
        return [name for name, param in model.named_parameters() if id(param) in found]

    def mistakes(self) -> list[str]:
        """Return the texts of the warnings about mistakes that were given."""
        return list(self._watch.warnings) if self._enabled else []

    def is_unused(self) -> bool:
        """Return True if it has scaled no loss, and the program has not read the scale."""
        watch = self._watch
        is_used = self._has_scaled or watch.has_scaled or watch.is_scale_known
        return not (is_used or self._history.has_stepped)

    def only_scales(self) -> bool:
        """Return True if losses were scaled, and no gradients unscaled, by the scaler or others."""
        is_used = self._history.has_stepped or self._watch.has_unscaled
        return self._has_scaled and not is_used and not self._watch.is_scale_known
