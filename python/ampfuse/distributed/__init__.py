"""Training on several ranks: one norm and one decision to skip, and norms during backward."""

from ampfuse.distributed._norms_in_backward import norms_in_backward
from ampfuse.distributed._process_groups import join_ranks

__all__ = ["join_ranks", "norms_in_backward"]
