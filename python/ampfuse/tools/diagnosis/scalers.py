"""Records the updates of all scalers that a program makes."""

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from ampfuse.amp import GradScaler
from ampfuse.tools.hooks import hook_functions

RECORDED_UPDATES = 2**16  # number of updates recorded for each scaler, 12 bytes each on its device
MOST_SCALERS = 16


class ScalerRecorder:
    """Keeps the last scalers that are made until `exits` closes, by the program or by `patch()`.

    Scalers that are made without a history record their updates, too. Others keep the length of
    their history, which the program may read.
    """

    def __init__(self, exits: ExitStack) -> None:
        self.enabled: deque[GradScaler] = deque(maxlen=MOST_SCALERS)
        self.has_disabled = False
        hook_functions(exits, make_scaler=self._recorded)

    def _recorded(self, init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def recorded(scaler: GradScaler, *args: Any, history: int = 0, **kwargs: Any) -> None:
            init(scaler, *args, history=RECORDED_UPDATES if history == 0 else history, **kwargs)
            # A derived class may have an is_enabled() that needs the rest of its constructor.
            if GradScaler.is_enabled(scaler):
                self.enabled.append(scaler)
            else:
                self.has_disabled = True

        return recorded
