"""How the operators are called from Python."""

from typing import Any

import torch

from ampfuse import _C


class Op:
    """An operator of `torch.ops.ampfuse`, with less work for the host where nobody would notice.

    torch counts a reference to every tensor of a list that it takes, for which it has to take
    Python's lock: half of a call on ten thousand small tensors. Calls with plain tensors and
    numbers, in eager mode, lend the lists instead.
    """

    def __init__(self, name: str, overload: str = "") -> None:
        self._overload = getattr(getattr(torch.ops.ampfuse, name), overload or "default")
        self._lend = _C.EagerOp(f"ampfuse::{name}", overload)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """All arguments of the schema; one that has no default is by name where the schema says."""
        if not torch.compiler.is_compiling():
            result = self._lend(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._overload(*args, **kwargs)
