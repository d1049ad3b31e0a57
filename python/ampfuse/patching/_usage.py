"""Counts the uses of replacements, and those of torch's originals with the reasons."""

import logging
from collections import Counter

from ampfuse._graphs import eager_only

logger = logging.getLogger("ampfuse")


class Usage:
    """The counts of one part."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.served = 0
        self.left_to_torch: Counter[str] = Counter()

    @eager_only
    def serve(self) -> None:
        """Count one use, but not in traced code, where each count would recompile."""
        self.served += 1

    @eager_only
    def leave_to_torch(self, what: str, reason: str) -> None:
        """Count one use of torch's original; log the first one for each reason."""
        self.left_to_torch[reason] += 1
        if self.left_to_torch[reason] == 1:
            logger.warning("%s is left to torch: %s", what, reason)

    def forget(self) -> None:
        """Reset the counts."""
        self.served = 0
        self.left_to_torch.clear()
