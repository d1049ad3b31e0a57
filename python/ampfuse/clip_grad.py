"""Gradient clipping with the signatures and results of `torch.nn.utils`, without its traffic.

Gradients are read once for the norm, and read and written once more only when they have to be
scaled: the factor is decided on the device, and at factor 1 nothing moves (but strided gradients on
a GPU, which are copied out and back all the same). torch scales always.
"""

import math
import re
import types
import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import utils as torch_utils

from ampfuse import _C, ops

TensorOrTensors = Tensor | Iterable[Tensor]
T = TypeVar("T")


def _as_list(tensors: TensorOrTensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    grads = [parameter.grad for parameter in parameters]
    return [grad for grad in grads if grad is not None]


def _renamed(error: Exception, names: list[str]) -> Exception:
    """The same error, about `names[i]` where it is about `tensors[i]`."""
    named = re.sub(r"tensors\[(\d+)\]", lambda match: names[int(match[1])], str(error))
    return type(error)(named)


def _about_parameters(error: Exception, parameters: list[Tensor]) -> Exception:
    """An error about a list of gradients as one about the parameters that have them."""
    with_gradients = (i for i, parameter in enumerate(parameters) if parameter.grad is not None)
    return _renamed(error, [f"parameters[{i}].grad" for i in with_gradients])


def _each_device(tensors: list[Tensor], call: Callable[[list[Tensor]], T]) -> list[T]:
    """What `call` makes of each device's tensors; errors name places in the whole list."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(place)
    results = []
    for of_device in places.values():
        try:
            results.append(call([tensors[place] for place in of_device]))
        except (ValueError, TypeError) as error:
            raise _renamed(error, [f"tensors[{place}]" for place in of_device]) from None
    return results


def _is_ours(tensors: list[Tensor], norm_type: float) -> bool:
    """Whether our kernels serve this call; the rest is left to torch, which has the same results.

    That is tensor subclasses that bring their own arithmetic (DTensor reduces over its mesh) and
    orders other than 1, 2 and inf.
    """
    return norm_type in (1.0, 2.0, math.inf) and set(map(type, tensors)) <= {
        torch.Tensor,
        torch.nn.Parameter,
    }


def _is_alone() -> bool:
    """Whether nobody writes gradients but this process, which its version counters tell.

    Collectives do not move them: replicas that are unscaled first and averaged then would be
    clipped by norms of their own.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return True
    return distributed.get_world_size() == 1


@torch.no_grad()
def get_total_norm(
    tensors: TensorOrTensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Norm of the tensors as if they were one vector: `torch.nn.utils.get_total_norm`.

    Lists of 16-bit tensors give a float32 norm, where torch rounds it to 16 bits (and so do we for
    orders other than 1, 2 and inf, which are left to torch). `foreach` is
    there for torch's signature; these kernels always take the whole list at once.
    `error_if_nonfinite` makes the host wait for the result.

    >>> import torch, ampfuse
    >>> ampfuse.get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
    tensor(5.)
    """
    tensors = _as_list(tensors)
    norm_type = float(norm_type)
    if not _is_ours(tensors, norm_type):
        return torch_utils.get_total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    if not tensors:
        return torch.tensor(0.0)

    def norm_of(tensors: list[Tensor]) -> Tensor:
        return ops.multi_tensor_norm(tensors, norm_type).total_norm

    def norm_over_devices() -> Tensor:
        norms = _each_device(tensors, norm_of)
        return (
            norms[0] if len(norms) == 1 else norm_of([norm.to(norms[0].device) for norm in norms])
        )

    if torch.compiler.is_compiling():
        total_norm = norm_over_devices()
    else:
        known = _C.recall_norm(tensors, False) if norm_type == 2 and _is_alone() else None
        try:
            total_norm = norm_of(tensors) if known is None else known
        except ValueError:  # several devices, most likely: asking each tensor first would take long
            total_norm = norm_over_devices()
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped; with error_if_nonfinite=False they would be scaled by it "
            "all the same"
        )
    return total_norm


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: TensorOrTensors,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients by `min(1, max_norm / (total_norm + 1e-6))`, as in `torch.nn.utils`.

    The factor is decided on the device. At factor 1 no gradient changes a bit.
    """
    parameters = _as_list(parameters)
    grads = _gradients(parameters)
    try:
        _clip(parameters, grads, float(max_norm), total_norm, foreach)
    except (ValueError, TypeError) as error:
        raise _about_parameters(error, parameters) from None


@torch.no_grad()
def clip_grad_norm_(
    parameters: TensorOrTensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`; return the norm they had.

    `torch.nn.utils.clip_grad_norm_` without a host wait and without writing gradients that need
    no scaling. The norm of 16-bit gradients is float32, as in `get_total_norm`.

    Right after `ampfuse.GradScaler.unscale_` the norm is the one that unscaling told, unless a
    gradient's version counter says that it was written since (writing through `.data` or `.numpy()`
    does not move it) or `torch.distributed` has several processes, whose collectives do not either.

    >>> import torch, ampfuse
    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> p.grad = torch.tensor([3.0, 4.0])
    >>> ampfuse.clip_grad_norm_([p], max_norm=1.0), p.grad
    (tensor(5.), tensor([0.6000, 0.8000]))
    """
    if isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.",
                stacklevel=3,  # past torch.no_grad's wrapper
            )
    parameters = _as_list(parameters)
    grads = _gradients(parameters)
    try:
        total_norm = get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
        _clip(parameters, grads, float(max_norm), total_norm, foreach)
    except (ValueError, TypeError) as error:
        raise _about_parameters(error, parameters) from None
    return total_norm


def _clip(
    parameters: list[Tensor],
    grads: list[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None,
) -> None:
    if not _is_ours([*grads, total_norm], norm_type=2.0):
        torch_utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
        return
    if not grads:
        return
    if total_norm.dtype not in (torch.float32, torch.float64) and not total_norm.is_complex():
        total_norm = total_norm.float()  # torch's norm of 16-bit gradients

    def clip(grads: list[Tensor]) -> None:
        ops.multi_tensor_clip(grads, total_norm.to(grads[0].device), max_norm)

    def check(grads: list[Tensor]) -> None:
        # At norm 0 the factor is 1: this refuses what clip would, and writes nothing.
        ops.multi_tensor_clip(grads, total_norm.new_zeros((), device=grads[0].device), max_norm=1.0)

    if torch.compiler.is_compiling():
        # To the op `max_norm` is a number that its graph is compiled for, each value anew. The
        # division makes it a number the graph computes with, and the factor stays the same.
        total_norm = (total_norm.double() + 1e-6) / max_norm - 1e-6
        max_norm = 1.0
        _each_device(grads, clip)  # an error ends the tracing: before anything is written, too
        return
    try:
        clip(grads)
    except ValueError:  # raised before anything is written
        if any(grad.layout != torch.strided for grad in grads):
            torch_utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
            return
        _each_device(grads, check)
        _each_device(grads, clip)
