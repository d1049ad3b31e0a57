"""Cross-entropy of logits, and of hidden states with the weight that maps them to logits."""

from ampfuse.losses.cross_entropy import CrossEntropyLoss, cross_entropy, cross_entropy_
from ampfuse.losses.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from ampfuse.losses.options import CrossEntropyMetrics

__all__ = [
    "CrossEntropyLoss",
    "CrossEntropyMetrics",
    "LinearCrossEntropyLoss",
    "cross_entropy",
    "cross_entropy_",
    "linear_cross_entropy",
]
