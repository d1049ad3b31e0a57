"""Optimizers that replace torch's."""

from ampfuse.optim.adam import Adam
from ampfuse.optim.adamw import AdamW
from ampfuse.optim.fused import FusedOptimizer

__all__ = ["Adam", "AdamW", "FusedOptimizer"]
