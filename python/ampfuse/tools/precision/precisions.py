"""The precisions in which a program is tried."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ampfuse._texts import without_numbers

FIRST_SCALE = 65536.0  # the default of torch's GradScaler
ANALYSED = 4  # calls of backward that are compared; two models that train in turn have two each


@dataclass(frozen=True)
class Precision:
    """How a program computes."""

    name: str
    dtype: torch.dtype | None = None
    """The dtype of autocast, or None for float32."""
    is_scaled: bool = False
    """True if the loss is multiplied by a scale before backward."""
    has_16bit_weights: bool = False
    """True if the weights of Adam have `dtype`, and float32 masters."""
    kept: tuple[str, ...] = ()
    """The names of modules that compute in float32 nevertheless."""

    @property
    def dtype_name(self) -> str:
        """The dtype's name, as in `"bfloat16"`."""
        return str(self.dtype or torch.float32).removeprefix("torch.")

    def keeping(self, modules: Iterable[str]) -> "Precision":
        """Return this precision, but with some modules in float32."""
        return replace(self, kept=(*self.kept, *modules))

    def keeps(self, module: str) -> bool:
        """Return True for modules that stay in float32, and for those that are repeated like them.

        With `"layers.0.norm"`, these are the norms of all layers.
        """
        kinds = {without_numbers(name) for name in self.kept} - {"*"}
        return module in self.kept or without_numbers(module) in kinds


FLOAT32 = Precision("float32")
BFLOAT16 = Precision("bfloat16", torch.bfloat16)
FLOAT16 = Precision("float16, scaled", torch.float16, is_scaled=True)
UNSCALED = Precision("float16, not scaled", torch.float16)
WEIGHTS = Precision("bfloat16 weights", torch.bfloat16, has_16bit_weights=True)
PRECISIONS = {one.name: one for one in (FLOAT32, BFLOAT16, FLOAT16, UNSCALED, WEIGHTS)}
