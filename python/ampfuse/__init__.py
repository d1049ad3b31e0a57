"""Mixed-precision training with fewer bytes, fewer launches and no host waits."""

import importlib
from typing import TYPE_CHECKING, Any

from ampfuse import _library

_library.load()

from ampfuse import _C, ops  # noqa: E402  (both need the library)
from ampfuse.accumulation import accumulate  # noqa: E402
from ampfuse.amp import GradScaler, ScaleCollapseError, ScaleRecord  # noqa: E402
from ampfuse.clip_grad import clip_grad_norm_, clip_grads_with_norm_, get_total_norm  # noqa: E402
from ampfuse.graphed_step import GraphedStep  # noqa: E402
from ampfuse.losses import (  # noqa: E402
    CrossEntropyLoss,
    CrossEntropyMetrics,
    LinearCrossEntropyLoss,
    cross_entropy,
    cross_entropy_,
    linear_cross_entropy,
)
from ampfuse.optim import SGD, Adam, AdamW, Mastered  # noqa: E402
from ampfuse.patching import patch, patched, unpatch  # noqa: E402

if TYPE_CHECKING:  # a type checker would accept any name in a module that has a __getattr__
    from ampfuse import checkpoint as checkpoint
    from ampfuse import distributed as distributed
    from ampfuse import integrations as integrations
    from ampfuse import memory as memory

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CrossEntropyLoss",
    "CrossEntropyMetrics",
    "GradScaler",
    "GraphedStep",
    "LinearCrossEntropyLoss",
    "Mastered",
    "ScaleCollapseError",
    "ScaleRecord",
    "accumulate",
    "build_info",
    "check_targets",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "cmake_prefix_path",
    "cross_entropy",
    "cross_entropy_",
    "get_total_norm",
    "has_cuda",
    "linear_cross_entropy",
    "ops",
    "patch",
    "patched",
    "unpatch",
]

if _C.has_cuda():
    _library.warn_of_old_driver(_C.build_info()["cuda_version"])

__version__: str = _C.build_info()["version"]

cmake_prefix_path: str = str(_library.PACKAGE)
"""The folder to add to a C++ project's `CMAKE_PREFIX_PATH`, for `find_package(ampfuse)`."""


def build_info() -> dict[str, Any]:
    """Return how the loaded library was built: versions, CUDA architectures, compiler, CPU kernels.

    Returns:
        Texts by name. `cuda_archs` is in CMake's notation, for example `"80-real 90"`.

    Examples:
        >>> import ampfuse
        >>> sorted(ampfuse.build_info())  # doctest: +NORMALIZE_WHITESPACE
        ['build_type', 'compiler', 'cpu_capability', 'cuda_archs', 'cuda_version', 'torch_version',
         'version']
    """
    return _C.build_info()


def check_targets() -> None:
    """Raise IndexError if a loss on a GPU has met a target out of range since the last call.

    The next loss on a GPU raises this error by itself, and so does the next call of a
    `GraphedStep`. Replays of other CUDA graphs do not: call this function now and then. The host
    does not wait, so errors of kernels that are still running are reported by a later call.

    Raises:
        IndexError: A target was out of range; the message names its row and the classes.

    Examples:
        >>> import ampfuse
        >>> ampfuse.check_targets()
    """
    _C.check_targets()


def has_cuda() -> bool:
    """Return True if the library was built with CUDA kernels, even if there is no GPU."""
    return _C.has_cuda()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import a module on its first use, since these import more than torch."""
        if name in ("checkpoint", "distributed", "integrations", "memory"):
            return importlib.import_module(f"ampfuse.{name}")
        raise AttributeError(f"module 'ampfuse' has no attribute {name!r}")
