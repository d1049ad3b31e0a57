"""The memory of training; `ampfuse.memory` has the public names."""
