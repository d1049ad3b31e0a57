"""The operators that convert moments between numbers and 8 bits."""

from typing import NamedTuple

import torch
from torch import Tensor

from ampfuse._graphs import bind_operator

_encode_moment = bind_operator(torch.ops.ampfuse.encode_moment.default)
_decode_moment = bind_operator(torch.ops.ampfuse.decode_moment.default)


class CodedMoment(NamedTuple):
    """A moment in 8 bits."""

    codes: Tensor
    """int8 for a moment that has signs, else uint8, of the moment's shape."""
    units: Tensor
    """One bfloat16 for each 32 codes in the order of memory."""


def encode_moment(moment: Tensor, *, is_signed: bool) -> CodedMoment:
    """Round a moment to 8 bits, to nearest.

    A moment that was decoded gets the codes and units that it had.

    Args:
        moment: Floating-point numbers.
        is_signed: True for Adam's first moments and for momentum. False for second moments.

    Returns:
        Codes and units, as `fused_adam` takes them.

    Raises:
        TypeError: The moment has integers.

    Examples:
        >>> import torch, ampfuse
        >>> ampfuse.ops.encode_moment(torch.tensor([4.0, -1.0]), is_signed=True).codes
        tensor([126, -63], dtype=torch.int8)
    """
    return CodedMoment(*_encode_moment(moment, is_signed=is_signed))


def decode_moment(codes: Tensor, units: Tensor) -> Tensor:
    """Return the moment that codes and units stand for.

    Args:
        codes: int8 or uint8.
        units: One bfloat16 for each 32 codes in the order of memory.

    Returns:
        A float32 tensor of the codes' shape.

    Raises:
        TypeError: The codes have another dtype.
        ValueError: There is another number of units.

    Examples:
        >>> import torch, ampfuse
        >>> codes = torch.tensor([16, -3], dtype=torch.int8)
        >>> ampfuse.ops.decode_moment(codes, torch.tensor([0.5], dtype=torch.bfloat16))
        tensor([64.0000, -2.2500])
    """
    decoded: Tensor = _decode_moment(codes, units)
    return decoded
