"""Optimizers that replace torch's."""

from ampfuse.optim.adam import Adam
from ampfuse.optim.adamw import AdamW

__all__ = ["Adam", "AdamW"]
