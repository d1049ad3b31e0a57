"""Makes a program compute in another precision."""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from ampfuse._graphs import is_in_backward, uses_gpu
from ampfuse.amp import GradScaler
from ampfuse.tools.hooks import replace
from ampfuse.tools.memory.as_on_gpu import convert_to_float32
from ampfuse.tools.precision.outcome import Outcome
from ampfuse.tools.program_lines import current_line


class Forcing:
    """Forces a precision on a program until `exits` closes.

    Where the program uses autocast, this changes its dtype. Elsewhere autocast begins with the
    first module that is called with gradients, and ends when backward begins: that is what one
    would write. Scalers of the program are disabled, since each trial scales losses itself.
    """

    def __init__(self, exits: ExitStack, outcome: Outcome, running: Callable[[], str]) -> None:
        self._outcome = outcome  # which gets lines of the program and its own dtype
        self._running = running  # returns the name of the module that runs, or an empty text
        self._precision = outcome.precision
        self._keeps = cache(self._precision.keeps)  # asked at each call of a module
        self._own = ExitStack()
        self._is_on = False
        self._init: Any = torch.autocast.__init__
        replace(exits, torch.autocast, "__init__", self._changed(self._init))
        replace(exits, GradScaler, "__init__", self._disabled(GradScaler.__init__))
        exits.callback(self.end)

    def run(
        self,
        call: Any,
        module: nn.Module,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        may_begin: bool,
    ) -> Any:
        """Call a module in the precision that it should have. Autocast may begin with it."""
        dtype = self._precision.dtype
        if dtype is None:
            return call(module, *args, **kwargs)
        if self._keeps(name):
            args, kwargs = convert_to_float32((args, kwargs))
            with self._autocast(module, dtype, False):
                return call(module, *args, **kwargs)
        # Autocast does not begin where the program does so itself.
        is_used = self._is_on or self._outcome.autocasts
        if is_used or not may_begin or next(module.parameters(), None) is None:
            return call(module, *args, **kwargs)
        context = self._autocast(module, dtype, True)
        if not torch.is_grad_enabled():
            with context:
                return call(module, *args, **kwargs)
        self._own.enter_context(context)
        self._is_on = True
        output = call(module, *args, **kwargs)
        if self._outcome.autocasts:  # the module enables autocast itself
            self.end()
        return output

    def end(self) -> None:
        """End autocast before backward, and before an optimizer changes the weights."""
        self._is_on = False
        self._own.close()
        torch.clear_autocast_cache()  # weights change now; autocast may go on around this

    def _autocast(self, module: nn.Module, dtype: torch.dtype, is_enabled: bool) -> Any:
        context = object.__new__(torch.autocast)
        self._init(context, device_of(module), dtype=dtype, enabled=is_enabled)
        return context

    def note(self, name: str) -> None:
        """Note under this name which line of the program runs, if it is the first."""
        if name not in self._outcome.places:
            self._outcome.places[name] = str(current_line() or "the program")

    def _changed(self, init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def changed(
            context: Any,
            device_type: str,
            dtype: torch.dtype | None = None,
            enabled: bool = True,
            cache_enabled: bool | None = None,
        ) -> None:
            init(context, device_type, dtype, enabled, cache_enabled)
            # Autocast of a device that is not there is not enabled. In backward, torch's checkpoint
            # makes contexts.
            if not is_in_backward() and not self._outcome.seconds:  # finding a line takes time
                if context._enabled:
                    line = str(current_line() or "the program")
                    self._outcome.autocasts.setdefault(line, str(context.fast_dtype))
                elif not (self._running() or self._outcome.autocasts):
                    self.note("off")
                elif not enabled and device_type == ("cuda" if uses_gpu() else "cpu"):
                    self.note("float32")
            enabled = enabled and self._precision.dtype is not None
            dtype = self._precision.dtype if enabled else dtype
            init(context, device_type, dtype, enabled, cache_enabled)

        return changed

    def _disabled(self, init: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(init)

        @wraps(init)
        def changed(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(scaler, *args, **kwargs).arguments
            if given.get("enabled", True):
                self.note("scaler")
            init(**given | {"enabled": False})

        return changed


def device_of(module: nn.Module) -> str:
    """Return the kind of device of a module's parameters."""
    param = next(module.parameters(), None)
    return ("cuda" if uses_gpu() else "cpu") if param is None else param.device.type
