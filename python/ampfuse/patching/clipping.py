"""Replaces `torch.nn.utils.clip_grad_norm_`."""

import functools
from collections.abc import Callable
from types import GeneratorType
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad as torch_clip_grad

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse.clip_grad import TensorOrTensors, clip_grad_norm_
from ampfuse.patching._usage import Usage

USAGE = Usage("clip_grad_norm")

NAME = "torch.nn.utils.clip_grad_norm_"

original = torch_clip_grad.clip_grad_norm_


def replacement(is_on: Callable[[], bool]) -> Any:
    """Return the replacement of `torch.nn.utils.clip_grad_norm_`."""

    @functools.wraps(original)
    def replaced(parameters: TensorOrTensors, *rest: Any, **named: Any) -> Tensor:
        if not is_on():
            return original(parameters, *rest, **named)
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not params and isinstance(parameters, GeneratorType):
            return original((param for param in params), *rest, **named)  # torch warns
        try:
            norm = clip_grad_norm_(params, *rest, **named)
        except (TypeError, ValueError, NotImplementedError) as error:  # nothing was written
            USAGE.count_fallback(NAME, str(error).splitlines()[0])
        else:
            USAGE.count_use()
            return _rounded(norm, params)
        return original(params, *rest, **named)  # raises torch's error alone, or accepts this

    return replaced


def _rounded(norm: Tensor, params: list[Tensor]) -> Tensor:
    """Round the norm as torch does, if all gradients have the same 16-bit dtype."""
    dtypes = (param.grad.dtype for param in params if param.grad is not None)
    first = next(dtypes, norm.dtype)  # the others are checked only if this is a 16-bit dtype
    is_rounded = first in DTYPES_16_BIT and all(dtype == first for dtype in dtypes)
    return norm.to(first) if is_rounded else norm
