"""Counts the uses of replacements, and those of torch's originals with the reasons."""

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
        """Count one use, but not in traced code, where each count would recompile."""
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
