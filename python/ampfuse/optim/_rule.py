"""The rule of an optimizer: what it has besides the step that all fused optimizers share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ampfuse.optim import _coded

Group = dict[str, Any]  # a group's options, by name


class StateOptions(NamedTuple):
    """The options that decide which state a parameter has, and its dtypes."""

    master_weights: bool | str
    moment_dtype: str | torch.dtype | None
    moments: tuple[str, ...]
    first_step_sets_moments: bool
    has_ema: bool
    ema_dtype: str | torch.dtype | None

    @property
    def is_coded(self) -> bool:
        """Return True if moments are in 8 bits."""
        return self.moment_dtype == _coded.NAME and bool(self.moments)

    @property
    def counts_steps(self) -> bool:
        """Return True if a parameter has a step counter."""
        needs_count = bool(self.moments) or self.has_ema or self.master_weights == "stochastic"
        return needs_count or not self.first_step_sets_moments

    @property
    def unit_entries(self) -> tuple[str, ...]:
        """Return the names of the entries with units of moments in 8 bits."""
        if not self.is_coded:
            return ()
        return tuple(_coded.units_name(name) for name in self.moments)

    @property
    def draws_randoms(self) -> bool:
        """Return True if steps may round at random."""
        has_bfloat16_ema = self.has_ema and str(self.ema_dtype).endswith("bfloat16")
        return self.is_coded or self.master_weights == "stochastic" or has_bfloat16_ema


@dataclass(frozen=True)
class Rule:
    """The moments, options and operator by which optimizers differ."""

    name: str
    op: Callable[..., None]
    """The operator. It takes lists: parameters, gradients, each of `moments`, steps and masters."""
    op_options: Callable[[Group], dict[str, Any]]
    """Returns a group's options that the operator takes as numbers and flags."""
    moments: tuple[str, ...]
    """All entries of a parameter's state that have the dtype of moments."""
    moments_of: Callable[[Group], tuple[str, ...]]
    """Returns the first few of `moments`: those of a group's parameters."""
    moment_dtype: str
    """The name of the option that is the dtype of moments."""
    numbers: tuple[str, ...]
    """The options besides `lr` that are numbers."""
    flags: tuple[str, ...]
    needed_options: tuple[str, ...]
    """A loaded group that lacks one of these is perhaps another optimizer's."""
    needed_state: tuple[str, ...]
    """The entries that each state in a state dict has."""
    check: Callable[[Group], None]
    """Raises for options that no step can use. Types of numbers and flags were checked before."""
    sparse_error: str
    plain: Callable[[Group], None] = lambda group: None
    """Converts options to Python's own types, since others cannot be saved and loaded."""
    warn: Callable[[Group, dict[str, Any]], None] = lambda group, own: None
    """Warns of a new group's options that seldom make sense."""
    first_step_sets_moments: bool = False
    """True if a step whose counter is 0 sets the moments, whatever they hold. Then steps are
    counted only while there are moments, and new moments set the counter to 0."""

    @property
    def ours(self) -> dict[str, Any]:
        """Return the options that torch does not have, with the values of torch's behaviour.

        Only the optimizer holds the constructor's values; a group holds those that were set for it.
        So groups in state dicts have the same keys as in torch, for tools that match checkpoints by
        key.
        """
        return {
            "master_weights": False,
            self.moment_dtype: None,
            "max_grad_norm": None,
            "write_back_grads": False,
            "ema": None,
            "ema_dtype": None,
            "seed": 0,
        }

    def state_options(self, group: Group, own: dict[str, Any]) -> StateOptions:
        """Return the options that decide on the state of a group's parameters."""
        return StateOptions(
            group.get("master_weights", own["master_weights"]),
            group.get(self.moment_dtype, own[self.moment_dtype]),
            self.moments_of(group),
            self.first_step_sets_moments,
            group.get("ema", own["ema"]) is not None,
            group.get("ema_dtype", own["ema_dtype"]),
        )
