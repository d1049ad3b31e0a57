"""`Gate`: a learning rate scheduler that stands still when steps are skipped."""

from collections import deque
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ampfuse._host_copy import HostCopy

MOST_UNKNOWN = 16  # steps that the host may be ahead of a GPU before it waits


class Gate:
    """Steps a scheduler unless the last step of the optimizer was skipped; see `GradScaler.gate`.

    On a GPU it is known some steps later whether a step was skipped. The scheduler follows then.
    The host waits only if it is more than 16 steps ahead. Other attributes are the scheduler's.

    Args:
        scheduler: A scheduler of `torch.optim.lr_scheduler`.
        scaler: An `ampfuse.GradScaler`.
    """

    def __init__(self, scheduler: Any, scaler: Any) -> None:
        if hasattr(scheduler, "param_groups") or not hasattr(scheduler, "step"):
            raise TypeError(
                "gate: scheduler: expected a scheduler of torch.optim.lr_scheduler, got "
                f"{type(scheduler).__name__}"
            )
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError("gate: ReduceLROnPlateau is stepped by epochs, so it needs no gate")
        self.scheduler, self._scaler = scheduler, scaler
        self._unknown: deque[HostCopy] = deque()
        self._spare: list[HostCopy] = []

    def step(self) -> None:
        """Step the scheduler, once after each `update`, unless the step was skipped."""
        if not self._scaler.is_enabled():
            self.scheduler.step()
            return
        copy = self._spare.pop() if self._spare else HostCopy()
        copy.send(self._scaler.step_skipped)
        self._unknown.append(copy)
        while self._unknown and (
            self._unknown[0].latest() is not None or len(self._unknown) > MOST_UNKNOWN
        ):
            self._follow()

    def wait(self) -> None:
        """Wait until the scheduler has followed all steps."""
        while self._unknown:
            self._follow()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state after all steps so far. The host waits for them."""
        self.wait()
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the scheduler's state. Pending steps are discarded.

        Args:
            state_dict: The result of `state_dict()` of a gate or of the scheduler.
        """
        self._unknown.clear()
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the scheduler."""
        # An object that is being copied has no `scheduler` yet.
        if name.startswith("_") or name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and deepcopy, with the answers that are not followed yet.

        The scheduler does not follow them now: the optimizer, whose learning rates it sets, may
        have been copied already.
        """
        return vars(self) | {"_spare": []}

    def _follow(self) -> None:
        copy = self._unknown.popleft()
        skipped = copy.wait()
        assert skipped is not None
        if not skipped.item():
            self.scheduler.step()
        self._spare.append(copy)
