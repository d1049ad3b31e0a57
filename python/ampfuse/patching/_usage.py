"""Counts how often a replacement was used, and how often and why torch's original was."""

import logging
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from ampfuse._graphs import eager_only

logger = logging.getLogger("ampfuse")


class Usage:
    """The counts of one part."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.uses = 0
        self.fallbacks: Counter[str] = Counter()
        self.waits_avoided = 0
        """Steps in which the host did not wait for a GPU, but would have with torch's objects."""
        self.on_input: Callable[[Tensor], None] | None = None
        """A function that is called with the input of each use, if the use has one."""

    @eager_only
    def count_use(self, input: Tensor | None = None) -> None:
        """Count one use. Traced code does not count: a changed count would compile it again."""
        self.uses += 1
        if self.on_input is not None and input is not None:
            self.on_input(input)

    @eager_only
    def count_fallback(self, what: str, reason: str) -> None:
        """Count one use of torch's original; log the first one for each reason."""
        self.fallbacks[reason] += 1
        if self.fallbacks[reason] == 1:
            logger.warning("%s is left to torch: %s", what, reason)
