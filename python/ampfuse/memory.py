"""The memory of training: what it is for, and how much a change of the program would save."""

from ampfuse.tools.memory.account import Account, Saving, account
from ampfuse.tools.memory.batch import BatchSize, largest_batch
from ampfuse.tools.memory.growth import Suspect
from ampfuse.tools.memory.monitor import Monitor, Sample
from ampfuse.tools.memory.plan import Plan, plan

__all__ = [
    "Account",
    "BatchSize",
    "Monitor",
    "Plan",
    "Sample",
    "Saving",
    "Suspect",
    "account",
    "largest_batch",
    "plan",
]
