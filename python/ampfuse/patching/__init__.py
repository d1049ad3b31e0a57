"""Torch's own names for what ampfuse is faster at, for programs that are to stay as they are.

| part             | what is replaced                                                        |
| ---------------- | ----------------------------------------------------------------------- |
| `scaler`         | `torch.amp.GradScaler`, `torch.GradScaler`, the old ones in `cuda.amp` … |
| `optimizers`     | `torch.optim.Adam`, `torch.optim.AdamW`                                 |
| `cross_entropy`  | `torch.nn.functional.cross_entropy`, and so `torch.nn.CrossEntropyLoss` |
| `clip_grad_norm` | `torch.nn.utils.clip_grad_norm_`                                        |
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ampfuse.patching._parts import PARTS, changing, chosen, tell_unreached

__all__ = ["PARTS", "patch", "patched", "unpatch"]


def patch(*parts: str, without: Iterable[str] = ()) -> None:
    """Have torch's names mean ampfuse's, until `unpatch()`: of these parts, or of all.

    The parts are `"scaler"`, `"optimizers"`, `"cross_entropy"` and `"clip_grad_norm"`.

    - `torch.amp.GradScaler(...)` makes an `ampfuse.GradScaler`, as do its older names.
    - `torch.optim.Adam(...)` and `AdamW(...)` make ampfuse's, whatever torch's implementation was
      to be chosen; but a scaler's steps unscale gradients themselves with `fused=True` alone.
      Without, these are unscaled before, and where hooks or wrappers would see a step that is
      skipped, and until there is state, the host waits to know, as in torch. They have torch's
      options and state, but that moments of float16 parameters are float32. What they cannot do is
      left to torch's class (`differentiable=True`, parameters that are neither on a CPU nor a GPU
      of NVIDIA's, or twice in a group), and the reason is logged, once; and so is what is made
      while a program has put methods of its own into the class.
    - `torch.nn.functional.cross_entropy`, and so `torch.nn.CrossEntropyLoss`, is
      `ampfuse.cross_entropy`, with losses in torch's dtypes and with second derivatives. It
      expects the gradient that `scaler.scale(loss).backward()` brings, of the newest scaler that
      is alive and has been used. That is a guess: where it is another scaler's scale, or the
      gradient is taken without one (a loss divided by three, say), that costs one more pass over
      the gradient, and one more rounding where it has 16 bits and the factor is no power of two.
      (In half precision a guess that is far off would lose digits. So there is none where several
      scalers are alive, or the program has a class of scalers of its own, and never one below 1.)
      Logits must stay as they are until backward, which may read them; torch's reads a copy.
    - `torch.nn.utils.clip_grad_norm_` is ampfuse's.

    Names that modules imported before mean ampfuse's, too. Where torch's are referred to by other
    names, in tables, default arguments or closures, a warning is logged that says where; what
    objects have as attributes, `self.loss = cross_entropy` say, is not looked at. Classes stay
    torch's for `isinstance`, and for classes that derive from them, whose metaclass may be `type`
    or `ABCMeta`. Torch's own, made before or left to torch, are not pickled meanwhile: their name
    means another class. Ampfuse's are pickled as such; state dictionaries load in either. To call
    it again changes nothing.

    >>> import torch, ampfuse
    >>> ampfuse.patch()
    >>> isinstance(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]), ampfuse.AdamW)
    True
    >>> ampfuse.unpatch()
    """
    wanted = chosen(parts, without)
    with changing():
        new = [part for part in wanted if not part.is_patched]
        for part in new:
            part.is_patched = True
    tell_unreached(new)


def unpatch(*parts: str) -> None:
    """Undo `patch()`: of these parts, or of all. Inside of a `patched()` it waits for its end."""
    with changing():
        for part in chosen(parts, ()):
            part.is_patched = False


@contextmanager
def patched(*parts: str, without: Iterable[str] = ()) -> Iterator[None]:
    """As `patch()`, for a block, whatever way that ends; for all threads, and for others' blocks
    until their own ends.

    Entry and exit each look through the names of all imported modules, which takes milliseconds:
    about ten where 2,500 modules are imported. So put the block around a training loop, not inside
    it.

    >>> import torch, ampfuse
    >>> with ampfuse.patched("scaler"):
    ...     scaler = torch.amp.GradScaler("cpu")
    >>> isinstance(scaler, ampfuse.GradScaler), isinstance(scaler, torch.amp.GradScaler)
    (True, True)
    """
    wanted, entered = chosen(parts, without), []
    try:
        with changing():
            for part in wanted:
                part.blocks += 1
                entered.append(part)
        yield
    finally:
        with changing():
            for part in entered:
                part.blocks -= 1
