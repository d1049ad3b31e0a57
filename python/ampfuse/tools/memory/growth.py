"""Finds what makes the memory of a program grow from step to step.

For two steps, all allocations are recorded with the line of the program that made them. Lines whose
memory is still live a step later are the suspects, and so are containers that have become longer.
"""

import gc
import inspect
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from itertools import islice
from numbers import Number
from pathlib import Path
from traceback import walk_stack
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from ampfuse._graphs import is_in_backward
from ampfuse._nested import stored_tensors_in
from ampfuse._texts import size_text
from ampfuse.tools.hooks import hook_modules
from ampfuse.tools.program_lines import file_name, is_of_program, program_frame

CONTAINERS = (list, dict, set, deque)
SHOWN = 3
LEAST_BYTES = 1024  # of a tensor that is counted
FEW_NUMBERS = 1000  # of some 32 bytes each


class Suspect(NamedTuple):
    """Memory that stays, and where it comes from."""

    where: str
    """A line of the program, or the name of a container."""
    what: str
    bytes: int
    """Bytes per step; 0 for a container, whose elements may be small."""

    def __str__(self) -> str:
        """Return the suspect as text."""
        if self.bytes:
            return f"{f'{self.where} {self.what}'.rstrip()}: {size_text(self.bytes)} a step"
        return f"{self.where} has become a {self.what}"


class Look(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the allocations of two steps: call `end_step()` after each of them.

    Begin it only if `may_begin()`. Modes that are entered later must exit first: `stop` returns
    False until this one is the innermost. Compiled functions run without the compiler meanwhile.
    The compiler would otherwise give up these functions for good.
    """

    supports_higher_order_operators = True

    @staticmethod
    def may_begin() -> bool:
        """Return True if modes can be entered here, and left later."""
        return not is_in_backward() and _get_current_dispatch_mode() is None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lengths = {id(one): len(one) for one in gc.get_objects() if type(one) in CONTAINERS}
        self._step = 0
        self._modules: list[str] = []
        # Step, bytes, line and module of each storage that was allocated and is still live.
        self._live: dict[int, tuple[weakref.ref[Any], int, int, str, str]] = {}
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # storages from before
        self._exits = ExitStack()
        hook_modules(self._exits, self._enter_module, self._leave_module)
        if "torch._dynamo" in sys.modules:
            self._exits.enter_context(torch.compiler.set_stance("force_eager"))
        self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and record new storages."""
        if self._step >= 2:
            return operator(*args, **(kwargs or {}))
        for tensor in stored_tensors_in((args, kwargs)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                self._known.add(storage)
        results = operator(*args, **(kwargs or {}))
        for tensor in stored_tensors_in(results):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._live and storage not in self._known:
                reference = weakref.ref(storage, partial(self._freed, key))
                module = self._modules[-1] if self._modules else ""
                frame = program_frame(sys._getframe(1))
                # Backward may run in a thread of its own, without a frame of the program.
                line = f"{file_name(frame.f_code)}:{frame.f_lineno}" if frame else "backward"
                self._live[key] = (reference, self._step, storage.nbytes(), line, module)
        return results

    def end_step(self) -> bool:
        """Note that a step has ended. Return True if the look is over."""
        self._step += 1
        return self._step >= 2 and self.stop()

    def stop(self) -> bool:
        """Stop recording. Return False if another mode has to be left before."""
        self._step = max(self._step, 2)
        if _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._exits.close()
        return True

    def suspects(self, kept: Iterable[Any]) -> list[Suspect]:
        """Return what the first step has left behind, without the tensors that are `kept`."""
        storages = {tensor.untyped_storage()._cdata for tensor in stored_tensors_in(kept)}
        sizes: Counter[tuple[str, str]] = Counter()
        for key, (_, step, size, line, module) in self._live.items():
            if step == 0 and key not in storages and size >= LEAST_BYTES:
                sizes[line, module] += size
        found = [
            Suspect(line, f"in {module}" if module else "", size)
            for (line, module), size in sizes.most_common(SHOWN)
        ]
        return found + grown(self._lengths)

    def _freed(self, key: int, _: Any) -> None:
        self._live.pop(key)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._modules.append(type(module).__name__)

    def _leave_module(self, *_: Any) -> None:
        if self._modules:  # the look may begin inside a module
            self._modules.pop()


def grown(before: dict[int, int]) -> list[Suspect]:
    """Return the named containers that have gained at least two elements in the two steps."""
    suspects = []
    for one in gc.get_objects():
        if type(one) in CONTAINERS and one is not before:
            added = len(one) - before.get(id(one), len(one))
            if added >= 2 and not is_small(one, added) and (name := name_of(one)):
                suspects.append(Suspect(name, f"{type(one).__name__} of {len(one):,} elements", 0))
    return suspects[:SHOWN]


def is_small(container: Any, added: int) -> bool:
    """Return True if few numbers were added, which cannot be what makes memory grow."""
    if added >= FEW_NUMBERS:
        return False
    values = container.values() if isinstance(container, dict) else container
    # A set has no order.
    last = values if isinstance(values, set) else islice(reversed(values), added)
    return all(isinstance(value, Number) for value in last)


def name_of(container: Any) -> str:
    """Return the name by which the program knows a container, or an empty text.

    Variables of functions have names from Python 3.13 on. Before, reading them leaves a copy in the
    function's frame, which would keep a batch alive.
    """
    tops = sys._current_frames().values()
    for frame in [one for top in tops for one, _ in walk_stack(top) if is_of_program(one.f_code)]:
        if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            continue
        for name, value in frame.f_locals.items():
            if value is container:
                return f"{name} of {Path(frame.f_code.co_filename).name}"
    for holder in gc.get_referrers(container):
        for owner in gc.get_referrers(holder) if type(holder) is dict else [holder]:
            is_module = isinstance(owner, ModuleType)
            home = owner.__name__ if is_module else type(owner).__module__
            package = home.partition(".")[0]
            if package in sys.stdlib_module_names or package in ("torch", "ampfuse"):
                continue
            for name, value in getattr(owner, "__dict__", {}).items():
                if value is container:
                    return f"{home if is_module else type(owner).__name__}.{name}"
    return ""
