"""Gradient clipping with the signatures and results of `torch.nn.utils`, with less memory traffic.

Gradients are read once for the norm, and read and written once more only if they have to be
scaled. The factor is computed on the device, and at factor 1 no gradient is read or written (except
that gradients with gaps in memory are copied on a GPU and copied back). torch always scales.
"""

import math
import re
import types
import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_ as torch_clip_grads_with_norm_
from torch.nn.utils import get_total_norm as torch_get_total_norm

from ampfuse import ops
from ampfuse._graphs import traced_as
from ampfuse.gradients.mistakes import note_clip
from ampfuse.gradients.norms import norm_of_shards, rounded
from ampfuse.gradients.shards import is_distributed, is_dtensor, local

TensorOrTensors = Tensor | Iterable[Tensor]
T = TypeVar("T")

PARAMETERS = ": pass model.parameters()"  # what to do if a model or an optimizer was passed


def _make_list(name: str, tensors: TensorOrTensors, remedy: str = "") -> list[Tensor]:
    """Return the tensors of an argument as a list; raise if the first one is something else."""
    if isinstance(tensors, Tensor):
        return [tensors]
    try:
        given = list(tensors)
    except TypeError:
        given = None
    if given is None or (given and not hasattr(given[0], "grad")):
        items = f" of {type(given[0]).__name__}" if given else ""
        raise TypeError(f"{name}: expected tensors, got {type(tensors).__name__}{items}{remedy}")
    return given


def _gradients(parameters: list[Tensor]) -> list[Tensor]:
    grads = [parameter.grad for parameter in parameters]
    return [grad for grad in grads if grad is not None]


def _renamed(error: Exception, names: list[str]) -> Exception:
    """Return the error with `names[i]` in place of `tensors[i]` in its message."""
    named = re.sub(r"tensors\[(\d+)\]", lambda match: names[int(match[1])], str(error))
    return type(error)(named)


def _name_parameters(error: Exception, parameters: list[Tensor]) -> Exception:
    """Return an error about a list of gradients as an error about their parameters."""
    with_gradients = (i for i, parameter in enumerate(parameters) if parameter.grad is not None)
    return _renamed(error, [f"parameters[{i}].grad" for i in with_gradients])


def _each_device(tensors: list[Tensor], call: Callable[[list[Tensor]], T]) -> list[T]:
    """Call `call` with the tensors of each device; its errors name indices in the whole list."""
    indices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        indices.setdefault(tensor.device, []).append(index)
    results = []
    for of_device in indices.values():
        try:
            results.append(call([tensors[index] for index in of_device]))
        except (ValueError, TypeError) as error:
            raise _renamed(error, [f"tensors[{index}]" for index in of_device]) from None
    return results


@traced_as(_each_device)
def _call_at_once(tensors: list[Tensor], call: Callable[[list[Tensor]], T]) -> list[T]:
    """Call `call` with all tensors, or with those of each device if it refuses that."""
    try:
        return [call(tensors)]
    except ValueError:  # most likely several devices; checking for them first would take long
        return _each_device(tensors, call)


def _norm_of_list(tensors: list[Tensor], norm_type: float) -> Tensor:
    def norm_of(tensors: list[Tensor]) -> Tensor:
        return ops.multi_tensor_norm(tensors, norm_type).total_norm

    first, *others = _call_at_once(tensors, norm_of)
    return norm_of([first, *(norm.to(first.device) for norm in others)]) if others else first


def _have_several_meshes(tensors: list[Tensor]) -> bool:
    """Return True if DTensors are mixed with plain tensors, or belong to several meshes.

    Models with tensor parallelism, alone or with FSDP, have such parameters. torch raises for them.
    """
    if not is_distributed():
        return False
    meshes = [getattr(tensor, "device_mesh", None) for tensor in tensors]
    return any(mesh != meshes[0] for mesh in meshes)


def _is_ours(tensors: list[Tensor], norm_type: float = 2.0) -> bool:
    """Return True if our kernels support this call. Other calls go to torch.

    The others are calls with tensor subclasses, which have their own arithmetic (DTensor reduces
    over its mesh), and calls with orders other than 1, 2 and inf.
    """
    return norm_type in (1.0, 2.0, math.inf) and set(map(type, tensors)) <= {
        torch.Tensor,
        torch.nn.Parameter,
    }


def _are_strided(tensors: list[Tensor]) -> bool:
    return all(tensor.layout == torch.strided for tensor in tensors)


@torch.no_grad()
def get_total_norm(
    tensors: TensorOrTensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Compute the norm of all tensors as one vector, like `torch.nn.utils.get_total_norm`.

    Differences from torch: the norm of 16-bit tensors is float32, and not rounded to 16 bits
    (except for orders other than 1, 2 and inf, which torch computes). With order 2, DTensors may be
    mixed with plain tensors and belong to several meshes, for which torch raises; all ranks of a
    mesh must pass the same DTensors. A norm of order 2 that is in range is finite even if squares
    of elements overflow, as the square of 1e200 does in float64; torch returns infinity.

    Args:
        tensors: A tensor, or an iterable of tensors of any dtypes and devices.
        norm_type: Order of the norm.
        error_if_nonfinite: Raise if the norm is NaN or infinite, for which the host waits.
        foreach: Has no effect on our kernels, which always process the whole list at once.

    Returns:
        The norm, 0-dim, on the device of the first tensor; 0 if there is no tensor.

    Raises:
        RuntimeError: The norm is non-finite, and `error_if_nonfinite` is True.

    Examples:
        >>> import torch, ampfuse
        >>> ampfuse.get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    tensors = _make_list("tensors", tensors)
    return _total_norm(tensors, tensors, float(norm_type), error_if_nonfinite, foreach)


def _total_norm(
    tensors: list[Tensor],
    owners: list[Tensor],
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    """Return the norm of tensors, which are the `owners` themselves or their gradients.

    With several meshes the owners decide which collectives a rank calls: all ranks have the same
    owners, but perhaps not gradients of all of them.
    """
    if norm_type == 2 and _have_several_meshes(owners):
        total_norm = rounded(norm_of_shards(tensors, owners), tensors)
    elif not tensors:
        total_norm = torch.tensor(0.0)
    elif _is_ours(tensors, norm_type):
        try:
            total_norm = _norm_of_list(tensors, norm_type)
        except ValueError as error:
            if _are_strided(tensors):
                raise
            try:
                total_norm = torch_get_total_norm(tensors, norm_type)
            except NotImplementedError:  # torch 2.11 has no norm of sparse tensors, 2.15 has one
                raise error from None
    else:
        total_norm = torch_get_total_norm(tensors, norm_type, foreach=foreach)
    if error_if_nonfinite and not torch.isfinite(total_norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To scale them by this norm nevertheless, set "
            "error_if_nonfinite=False"
        )
    return total_norm


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: TensorOrTensors,
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    """Scale gradients in place by `min(1, max_norm / (total_norm + 1e-6))`, as in `torch.nn.utils`.

    The factor is computed on the device; the host does not wait. At factor 1 the gradients stay the
    same bit by bit.

    Args:
        parameters: A tensor, or an iterable of tensors; those without `.grad` are left out.
        max_norm: The largest norm that is left as it is.
        total_norm: Norm of the gradients, a tensor with one element, as of `get_total_norm`.
        foreach: Has no effect on our kernels, which always process the whole list at once.

    Raises:
        TypeError: A gradient or `total_norm` has a dtype that is not supported.
        ValueError: Gradients overlap in memory without being the same.
    """
    parameters = _make_list("parameters", parameters, PARAMETERS)
    grads = _gradients(parameters)
    try:
        _clip(parameters, grads, float(max_norm), total_norm, foreach)
    except (ValueError, TypeError) as error:
        raise _name_parameters(error, parameters) from None
    note_clip(grads, float(max_norm), total_norm)


@torch.no_grad()
def clip_grad_norm_(
    parameters: TensorOrTensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`.

    Unlike `torch.nn.utils.clip_grad_norm_`, this does not write gradients that need no scaling. The
    norm of 16-bit gradients is float32, as in `get_total_norm`. If parameters belong to several
    meshes, a rank may lack gradients that others have.

    The method `clip_grad_norm_` of `ampfuse.GradScaler` unscales and computes the norm in one pass.

    Args:
        parameters: A tensor, or an iterable of tensors; those without `.grad` are left out.
        max_norm: The largest norm that is left as it is.
        norm_type: Order of the norm.
        error_if_nonfinite: Raise if the norm is NaN or infinite, for which the host waits.
        foreach: Has no effect on our kernels, which always process the whole list at once.

    Returns:
        The norm before scaling, 0-dim, on the device of the first gradient.

    Raises:
        RuntimeError: The norm is non-finite, and `error_if_nonfinite` is True.

    Examples:
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
                stacklevel=3,  # skips torch.no_grad's wrapper
            )
    parameters = _make_list("parameters", parameters, PARAMETERS)
    grads = _gradients(parameters)
    try:
        owners = [one for one in parameters if one.requires_grad or one.grad is not None]
        total_norm = _total_norm(grads, owners, float(norm_type), error_if_nonfinite, foreach)
        _clip(parameters, grads, float(max_norm), total_norm, foreach)
        note_clip(grads, float(max_norm), total_norm)
    except (ValueError, TypeError) as error:
        raise _name_parameters(error, parameters) from None
    return total_norm


def _clip(
    parameters: list[Tensor],
    grads: list[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None,
) -> None:
    if not _is_ours([*grads, total_norm]):
        if is_dtensor(total_norm) or not _have_several_meshes(parameters):
            torch_clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
            if is_dtensor(total_norm):  # torch does not count this as a write
                torch.autograd.graph.increment_version(grads)
            return
        grads = [local(grad) for grad in grads]
    if not grads:
        return
    if total_norm.dtype not in (torch.float32, torch.float64) and not total_norm.is_complex():
        total_norm = total_norm.float()  # torch's norm of 16-bit gradients
    try:
        _clip_list(grads, max_norm, total_norm)
    except ValueError:  # raised before anything is written
        # torch scales a gradient twice that is listed twice.
        if _are_strided(grads) and len({grad.data_ptr() for grad in grads}) == len(grads):
            raise
        torch_clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)


def _clip_one_device(grads: list[Tensor], max_norm: float, total_norm: Tensor) -> None:
    ops.multi_tensor_clip(grads, total_norm.to(grads[0].device), max_norm)


def _traced_clip_list(grads: list[Tensor], max_norm: float, total_norm: Tensor) -> None:
    # The op takes `max_norm` as a constant, so each new value would recompile the graph. The
    # division makes it an input of the graph instead, and the factor stays the same. An error ends
    # the tracing, before anything is written.
    total_norm = (total_norm.double() + 1e-6) / max_norm - 1e-6
    _each_device(grads, lambda grads: _clip_one_device(grads, 1.0, total_norm))


@traced_as(_traced_clip_list)
def _clip_list(grads: list[Tensor], max_norm: float, total_norm: Tensor) -> None:
    try:
        _clip_one_device(grads, max_norm, total_norm)
    except ValueError:  # most likely several devices
        # At norm 0 the factor is 1: this raises whatever clipping would raise, and writes nothing.
        zero = torch.zeros_like(total_norm)
        _each_device(grads, lambda grads: _clip_one_device(grads, 1.0, zero))
        _each_device(grads, lambda grads: _clip_one_device(grads, max_norm, total_norm))
