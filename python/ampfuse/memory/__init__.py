"""The memory of training: what it is for, and how much a change of the program would save."""

from ampfuse.memory._account import Account, Saving, account
from ampfuse.memory._batch import BatchSize, largest_batch
from ampfuse.memory._plan import Plan, plan

__all__ = ["Account", "BatchSize", "Plan", "Saving", "account", "largest_batch", "plan"]
