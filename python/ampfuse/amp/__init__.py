"""A gradient scaler that replaces torch's."""

from ampfuse.amp._history import ScaleCollapseError, ScaleRecord
from ampfuse.amp.grad_scaler import GradScaler

__all__ = ["GradScaler", "ScaleCollapseError", "ScaleRecord"]
