"""Optimizers that replace torch's."""

from ampfuse.optim.adam import Adam
from ampfuse.optim.adamw import AdamW
from ampfuse.optim.fused import FusedOptimizer
from ampfuse.optim.mastered import Mastered
from ampfuse.optim.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "FusedOptimizer", "Mastered"]
