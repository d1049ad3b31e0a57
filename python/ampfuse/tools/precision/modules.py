"""Knows which module of a program computes, and which parameters the program has."""

import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ampfuse._graphs import is_in_backward
from ampfuse._nested import params_of
from ampfuse.tools.hooks import replace

# Calls a module: torch's function for it, the module, its name, its arguments, and True if it is
# called by the program's thread in forward.
Run = Callable[[Any, nn.Module, str, tuple[Any, ...], dict[str, Any], bool], Any]
WRAPPERS = ("_orig_mod.", "module.")  # in names that torch.compile and DistributedDataParallel give


class Modules:
    """The modules that the program's thread calls, by their names in the outermost one."""

    def __init__(self, exits: ExitStack, run: Run) -> None:
        """Notice calls until `exits` closes, and let `run` do them."""
        self.roots: list[nn.Module] = []
        """The outermost modules."""
        self.on_root: Callable[[nn.Module, Any], None] = lambda module, inputs: None
        """Called before a root runs."""
        self.on_output: Callable[[str, Any, Any], None] = lambda name, inputs, output: None
        """Called with a module's name, inputs and output."""
        self._run = run
        self._stack: list[str] = []
        self._names: dict[int, str] = {}
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self._optimizers: list[Optimizer] = []
        replace(exits, nn.Module, "__call__", self._noted(nn.Module.__call__))
        replace(exits, Optimizer, "__init__", self._noting_optimizer(Optimizer.__init__))

    @property
    def running(self) -> str:
        """The name of the innermost module that runs forward, or an empty text."""
        return self._stack[-1] if self._stack else ""

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters of all roots and optimizers by their names."""
        named: list[tuple[str, Tensor]] = []
        for root in self.roots:
            named += root.named_parameters()
        for optimizer in self._optimizers:
            named += [("parameter", param) for param in params_of(optimizer)]
        names: dict[Tensor, str] = {}  # tensors are equal as keys if they are the same one
        for name, param in named:
            names.setdefault(param, drop_wrappers(name))
        found: dict[str, Tensor] = {}
        counts: Counter[str] = Counter()
        for param, name in names.items():
            counts[name] += 1
            found[f"{name} ({counts[name]})" if counts[name] > 1 else name] = param
        return found

    def _noted(self, original: Any) -> Any:
        @wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or os.getpid() != self._process:
                return original(module, *args, **kwargs)
            # A module that is checkpointed runs again in backward.
            if is_in_backward() or threading.get_ident() != self._thread:
                name = self._names.get(id(module), "")
                return self._run(original, module, name, args, kwargs, False)
            return self._call(original, module, args, kwargs)

        return call

    def _noting_optimizer(self, init: Callable[..., None]) -> Callable[..., None]:
        @wraps(init)
        def noting(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._optimizers.append(optimizer)

        return noting

    def _call(
        self, original: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not self._stack:
            self._meet(module)
            self.on_root(module, (args, kwargs))
        name = self._names.get(id(module), type(module).__name__)
        self._stack.append(name)
        try:
            output = self._run(original, module, name, args, kwargs, True)
        finally:
            self._stack.pop()
        self.on_output(name, (args, kwargs), output)
        return output

    def _meet(self, module: nn.Module) -> None:
        """Note a root that is met for the first time."""
        if id(module) in self._names:
            return
        self.roots.append(module)
        for name, part in module.named_modules():
            name = drop_wrappers(f"{name}.").rstrip(".")
            self._names.setdefault(id(part), name or type(part).__name__)
        self._names[id(module)] = type(module).__name__


def drop_wrappers(name: str) -> str:
    """Return a name as it is in the program's own module."""
    while name.startswith(WRAPPERS):
        name = name.partition(".")[2]
    return name
