"""How often replacements served, and why torch's did where these did not."""

import logging
from collections import Counter

import torch

logger = logging.getLogger("ampfuse")


class Usage:
    """Of one part."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.served = 0
        self.left_to_torch: Counter[str] = Counter()

    def serve(self) -> None:
        """Count one, but not inside of torch.compile: each count would be compiled anew."""
        if not torch.compiler.is_compiling():
            self.served += 1

    def leave_to_torch(self, what: str, reason: str) -> None:
        """Count one that torch's own serves, and log the first for each reason."""
        if torch.compiler.is_compiling():
            return
        self.left_to_torch[reason] += 1
        if self.left_to_torch[reason] == 1:
            logger.warning("%s is left to torch: %s", what, reason)

    def forget(self) -> None:
        """Start counting anew."""
        self.served = 0
        self.left_to_torch.clear()
