"""Parts for other frameworks: the modules `lightning`, `accelerate`, `transformers`, `causal_lm`.

Each needs its framework, and is imported by its own name.
"""

from ampfuse.integrations._scale_metrics import ScaleMetrics

__all__ = ["ScaleMetrics"]
