"""The memory of training: what it is for, and how much a change of the program would save."""

from ampfuse.memory._account import Account, Saving, account
from ampfuse.memory._batch import BatchSize, largest_batch
from ampfuse.memory._growth import Suspect
from ampfuse.memory._monitor import Monitor
from ampfuse.memory._plan import Plan, plan
from ampfuse.memory._snapshot import Snapshot, read_snapshot
from ampfuse.memory._step_memory import Sample

__all__ = [
    "Account",
    "BatchSize",
    "Monitor",
    "Plan",
    "Sample",
    "Saving",
    "Snapshot",
    "Suspect",
    "account",
    "largest_batch",
    "plan",
    "read_snapshot",
]
