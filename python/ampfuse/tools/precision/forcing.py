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
from ampfuse.patching import optimizers
from ampfuse.tools.hooks import replace
from ampfuse.tools.memory.as_on_gpu import in_float32
from ampfuse.tools.precision.precisions import Precision
from ampfuse.tools.program_lines import Place, current_line


class Forcing:
    """Forces a precision on a program until `exits` closes.

    Where the program uses autocast, this changes its dtype. Elsewhere autocast begins with the
    first module that is called with gradients, and ends when backward begins: that is what one
    would write.
    """

    def __init__(self, exits: ExitStack, precision: Precision, scale: float) -> None:
        self.precision = precision
        self.autocast: Place | None = None
        """The line where the program enables autocast, if it does."""
        self.dtype: torch.dtype | None = None
        """The dtype that the program gives to autocast."""
        self.scaler: Place | None = None
        """The line where the program makes a scaler that is enabled."""
        self.optimizer: tuple[str, Place | None] = "", None
        """The name of the first optimizer that may have 16-bit weights, and the line of it."""
        self._scale = scale
        self._keeps = cache(precision.keeps)  # asked at each call of a module
        self._own = ExitStack()
        self._is_on = False
        self._init: Any = torch.autocast.__init__
        replace(exits, torch.autocast, "__init__", self._changed(self._init))
        replace(exits, GradScaler, "__init__", self._with_scale(GradScaler.__init__))
        optimizer: Any = optimizers._InPlaceOfTorchs
        replace(exits, optimizer, "__init__", self._with_masters(optimizer.__init__))
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
        dtype = self.precision.dtype
        if dtype is not None and self._keeps(name):
            args, kwargs = in_float32((args, kwargs))
            with self._autocast(device_of(module), dtype, False):
                return call(module, *args, **kwargs)
        if dtype is None or not may_begin or not self._should_begin(module):
            return call(module, *args, **kwargs)
        context = self._autocast(device_of(module), dtype, True)
        if not torch.is_grad_enabled():
            with context:
                return call(module, *args, **kwargs)
        self._own.enter_context(context)
        self._is_on = True
        output = call(module, *args, **kwargs)
        if self.autocast is not None:  # the module enables autocast itself
            self.end()
        return output

    def _should_begin(self, module: nn.Module) -> bool:
        """Return True if autocast begins with this module: not where the program does so itself."""
        has_16bit_weights = self.precision.has_16bit_weights
        if self._is_on or (self.autocast is not None and not has_16bit_weights):
            return False
        if next(module.parameters(), None) is None:
            return False
        # Evaluation without autocast would fail with 16-bit weights.
        return self.autocast is None or not torch.is_autocast_enabled(device_of(module))

    def begin_root(self) -> None:
        """Forget copies of weights that were made before another module ran."""
        torch.clear_autocast_cache()

    def end(self) -> None:
        """End autocast before backward, and before an optimizer changes the weights."""
        self._is_on = False
        self._own.close()
        torch.clear_autocast_cache()  # weights change now; autocast may go on around this

    def _autocast(self, device: str, dtype: torch.dtype, is_enabled: bool) -> Any:
        context = object.__new__(torch.autocast)
        self._init(context, device, dtype=dtype, enabled=is_enabled)
        return context

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
            if context._enabled and not is_in_backward() and self.autocast is None:
                self.autocast = current_line()
                self.dtype = dtype or torch.get_autocast_dtype(device_type)
            enabled = enabled and self.precision.dtype is not None
            dtype = self.precision.dtype if enabled else dtype
            init(context, device_type, dtype, enabled, cache_enabled)

        return changed

    def _with_masters(self, init: Callable[..., None]) -> Callable[..., None]:
        """Return an optimizer's `__init__` that converts weights if it should, but no vectors.

        Vectors are biases and the weights of norms, which are small and stay in float32.
        """

        @wraps(init)
        def changed(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            if not self.optimizer[0]:
                self.optimizer = type(optimizer).__name__, current_line()
            if not self.precision.has_16bit_weights:
                return
            for group in optimizer.param_groups:
                group["master_weights"] = True
                for param in group["params"]:
                    if param.dtype == torch.float32 and param.dim() > 1:
                        param.data = param.data.to(self.precision.dtype)

        return changed

    def _with_scale(self, init: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(init)

        @wraps(init)
        def changed(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(scaler, *args, **kwargs).arguments
            if is_enabled := given.get("enabled", True):
                self.scaler = self.scaler or current_line()
            is_enabled = is_enabled and self.precision.is_scaled
            init(**given | {"enabled": is_enabled, "init_scale": self._scale})

        return changed


def device_of(module: nn.Module) -> str:
    """Return the kind of device of a module's parameters."""
    param = next(module.parameters(), None)
    return ("cuda" if uses_gpu() else "cpu") if param is None else param.device.type
