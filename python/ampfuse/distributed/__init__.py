"""Training on several processes: what ours can use of torch.distributed."""

from ampfuse.distributed._norms_in_backward import norms_in_backward

__all__ = ["norms_in_backward"]
