"""Makes torch's names refer to ampfuse's objects, in programs that are not changed themselves.

| part             | what is replaced                                                        |
| ---------------- | ----------------------------------------------------------------------- |
| `scaler`         | `torch.amp.GradScaler`, `torch.GradScaler`, and their older names       |
| `optimizers`     | `torch.optim.Adam`, `torch.optim.AdamW`, `torch.optim.SGD`              |
| `cross_entropy`  | `torch.nn.functional.cross_entropy`, and so `torch.nn.CrossEntropyLoss` |
| `clip_grad_norm` | `torch.nn.utils.clip_grad_norm_`                                        |
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ampfuse.patching.parts import PARTS, changing, chosen

__all__ = ["PARTS", "patch", "patched", "unpatch"]


def patch(*parts: str, without: Iterable[str] = ()) -> None:
    """Replace torch's names by ampfuse's until `unpatch()`, in these parts or in all.

    - `scaler`: `torch.amp.GradScaler(...)` and its older names make an `ampfuse.GradScaler`.
    - `optimizers`: `torch.optim.Adam(...)`, `AdamW(...)` and `SGD(...)` make ampfuse's optimizers,
      also with `foreach=True`, `fused=True` or `capturable=True`. They have torch's options and
      state, with a step counter beside the momentum of SGD; only the moments of float16 parameters
      are float32. With `fused=True` the step unscales the gradients, as torch's does. Otherwise the
      scaler unscales them before the step. The host then waits for the result, as in torch, if
      hooks or wrappers would see a skipped step, or before the first step that is taken.
    - `cross_entropy`: `torch.nn.functional.cross_entropy`, and so `torch.nn.CrossEntropyLoss`, is
      `ampfuse.cross_entropy`, with losses in torch's dtypes and with second derivatives. The
      gradient of float16 logits is computed in backward, where the loss scale is known: do not
      change the logits until then. The gradient of other logits is computed in forward; if the loss
      is scaled, one more pass multiplies it.
    - `clip_grad_norm`: `torch.nn.utils.clip_grad_norm_` is `ampfuse.clip_grad_norm_`, with norms in
      torch's dtypes.

    Torch's class or function is used for what ampfuse's cannot do: `differentiable=True`,
    parameters that are neither on a CPU nor on an NVIDIA GPU, a parameter that is in a group twice,
    classes that derive from torch's; the step of SGD for parameters with sparse gradients; losses
    of tensor subclasses, under function modes and `torch.func`. The reason is logged once. Methods
    that a program sets in torch's classes are not called by our objects.

    Classes are changed in place, wherever the program refers to them. Functions are replaced in
    modules that use torch's own name: `from torch.nn.utils import clip_grad_norm_`. References
    elsewhere stay torch's: another name, a default argument, an attribute of an object. So patch
    before you import the program, or run it under `python -m ampfuse`, which does that. In groups
    of parameters the keys `max_grad_norm`, `master_weights`, `state_dtype` (of SGD
    `momentum_dtype`) and `write_back_grads` are ampfuse's options; a program cannot use them for
    itself.

    State dicts load into torch's objects and ours. A second call changes nothing.

    Args:
        *parts: Names of parts in the list above; all parts if no name is given.
        without: Names of parts that stay torch's.

    Raises:
        ValueError: A name is not that of a part.
        TypeError: A part is not a text.

    Examples:
        >>> import torch, ampfuse
        >>> ampfuse.patch()
        >>> isinstance(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), ampfuse.AdamW)
        True
        >>> ampfuse.unpatch()
    """
    wanted = chosen(parts, without)
    with changing():
        for part in wanted:
            part.is_patched = True


def unpatch(*parts: str) -> None:
    """Undo `patch()` for these parts, or for all; a `patched()` block keeps them until its end.

    Objects that were made meanwhile stay ampfuse's.

    Args:
        *parts: Names of parts as in `patch`; all parts if no name is given.
    """
    with changing():
        for part in chosen(parts, ()):
            part.is_patched = False


@contextmanager
def patched(*parts: str, without: Iterable[str] = ()) -> Iterator[None]:
    """Call `patch()` for the duration of a block, on all threads. Blocks may be nested or overlap.

    Args:
        *parts: Names of parts as in `patch`; all parts if no name is given.
        without: Names of parts that stay torch's.

    Yields:
        None, once: this is a context manager.

    Examples:
        >>> import torch, ampfuse
        >>> with ampfuse.patched("scaler"):
        ...     scaler = torch.amp.GradScaler("cpu")
        >>> isinstance(scaler, ampfuse.GradScaler), isinstance(scaler, torch.amp.GradScaler)
        (True, True)
    """
    wanted = chosen(parts, without)
    try:
        with changing():
            for part in wanted:
                part.blocks += 1
        yield
    finally:
        with changing():
            for part in wanted:
                part.blocks -= 1
