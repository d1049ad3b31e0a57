"""Training on several processes: what ours can use of torch.distributed."""

from ampfuse.distributed._norms_in_backward import norms_in_backward
from ampfuse.distributed._process_groups import join_ranks

__all__ = ["join_ranks", "norms_in_backward"]
