"""The memory of training: what it is for, and how much a change of the program would save."""

from ampfuse.memory._account import Account, Saving, account

__all__ = ["Account", "Saving", "account"]
