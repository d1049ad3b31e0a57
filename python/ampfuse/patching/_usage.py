"""Counts how often a replacement was used, and how often and why torch's original was."""

import logging
from collections import Counter

from ampfuse._graphs import eager_only

logger = logging.getLogger("ampfuse")


class Usage:
    """The counts of one part."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.uses = 0
        self.fallbacks: Counter[str] = Counter()

    @eager_only
    def count_use(self) -> None:
        """Count one use. Traced code does not count: a changed count would compile it again."""
        self.uses += 1

    @eager_only
    def count_fallback(self, what: str, reason: str) -> None:
        """Count one use of torch's original; log the first one for each reason."""
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            logger.warning("%s is left to torch: %s", what, reason)

    def forget(self) -> None:
        """Reset the counts."""
        self.uses = 0
        self.fallbacks.clear()
