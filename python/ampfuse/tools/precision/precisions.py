"""The precisions in which a program is tried."""

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
    kept: tuple[str, ...] = ()
    """The names of modules that compute in float32 nevertheless."""

    def __str__(self) -> str:
        """Return its name with the modules that stay in float32."""
        kinds = ", ".join(map(kind_of, self.kept))
        return f"{self.name}, with {kinds} in float32" if kinds else self.name

    def keeping(self, module: str) -> "Precision":
        """Return this precision, but with one more module in float32."""
        return replace(self, kept=(*self.kept, module))

    def keeps(self, module: str) -> bool:
        """Return True for modules that stay in float32, and for those that are repeated like them.

        With `"layers.0.norm"`, these are the norms of all layers.
        """
        return kind_of(module) in map(kind_of, self.kept)


def kind_of(module: str) -> str:
    """Return a name for all modules that are repeated like this one."""
    kind = without_numbers(module)
    return module if kind == "*" else kind


FLOAT32 = Precision("float32")
BFLOAT16 = Precision("bfloat16", torch.bfloat16)
FLOAT16 = Precision("float16 with a scaler", torch.float16, is_scaled=True)
UNSCALED = Precision("float16 without a scaler", torch.float16)
