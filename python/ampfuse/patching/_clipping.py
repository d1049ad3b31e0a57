"""`torch.nn.utils.clip_grad_norm_`: ours, whose norm is always that of what is there."""

import functools
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad as torch_clip_grad

from ampfuse import _C
from ampfuse.clip_grad import TensorOrTensors, clip_grad_norm_
from ampfuse.patching._usage import Usage

USAGE = Usage("clip_grad_norm")

NAME = "torch.nn.utils.clip_grad_norm_"

original = torch_clip_grad.clip_grad_norm_


def stand_in(is_on: Callable[[], bool]) -> Any:
    """For torch's function."""

    @functools.wraps(original)
    def replaced(parameters: TensorOrTensors, *rest: Any, **named: Any) -> Tensor:
        if not is_on():
            return original(parameters, *rest, **named)
        if torch.compiler.is_compiling():
            return clip_grad_norm_(parameters, *rest, **named)
        if isinstance(parameters, GeneratorType):
            parameters = list(parameters)
            if not parameters:
                empty = (parameter for parameter in parameters)
                return original(empty, *rest, **named)  # which warns
        # Programs may have written gradients through .data since unscale_().
        _C.forget_norms()
        try:
            norm = clip_grad_norm_(parameters, *rest, **named)
        except (TypeError, ValueError) as error:  # before anything is written
            USAGE.leave_to_torch(NAME, str(error).splitlines()[0])
            return original(parameters, *rest, **named)
        USAGE.serve()
        return norm

    return replaced
