"""Loss scaling in the place of torch's."""

from ampfuse.amp._memory import ScaleRecord
from ampfuse.amp.grad_scaler import GradScaler, ScaleCollapseError

__all__ = ["GradScaler", "ScaleCollapseError", "ScaleRecord"]
