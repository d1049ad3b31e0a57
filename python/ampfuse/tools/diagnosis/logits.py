"""Notices logits that a program converts to float32 before the loss."""

import torch
from torch import Tensor

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse.tools.program_lines import Place, current_line

VIEWS = ("View", "Alias", "Slice", "Select", "Clone")  # between conversion and loss
MOST_VIEWS = 4


class WideLogits:
    """Remembers the largest logits that were converted."""

    def __init__(self) -> None:
        self.bytes = 0
        self.dtype: torch.dtype | None = None
        """The dtype before the conversion."""
        self.place: Place | None = None

    def __call__(self, logits: Tensor) -> None:
        """Look at the logits of a loss."""
        if logits.dtype != torch.float32 or logits.nbytes <= self.bytes:
            return
        dtype = dtype_before(logits)
        if dtype in DTYPES_16_BIT:
            self.bytes, self.dtype = logits.nbytes, dtype
            self.place = current_line()


def dtype_before(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype from which a tensor was converted, if autograd knows it."""
    node = tensor.grad_fn
    for _ in range(MOST_VIEWS + 1):
        if node is None:
            return None
        source = node.next_functions[0][0] if node.next_functions else None
        if node.name() == "ToCopyBackward0":
            return None if source is None else source._input_metadata[0].dtype
        if not node.name().removesuffix("Backward0").endswith(VIEWS):
            return None
        node = source
    return None
