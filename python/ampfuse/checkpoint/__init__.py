"""Checkpoints with a hash for each tensor, which are complete or not there, and execute nothing."""

from ampfuse.checkpoint._errors import CheckpointError
from ampfuse.checkpoint._folder import latest
from ampfuse.checkpoint._load import Loaded, load, verify
from ampfuse.checkpoint._save import Saving, save

__all__ = ["CheckpointError", "Loaded", "Saving", "latest", "load", "save", "verify"]
