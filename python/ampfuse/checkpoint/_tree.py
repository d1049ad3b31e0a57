"""Turns state into JSON and named tensors, and back.

Numbers, texts, None, lists and dicts with texts as keys stay as they are. What JSON does not have
is a dict with one key that begins with "$": {"$tensor": name}, {"$tuple": [...]}, and so on.
"""

import base64
import math
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ampfuse.checkpoint._errors import CheckpointError
from ampfuse.checkpoint._shards import Shard, shard_of
from ampfuse.gradients.shards import is_dtensor, local

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)

TensorOf = Callable[[str, list[int] | None], Tensor]


class Encoder:
    """Collects the tensors of one or more states, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.shards: dict[str, Shard] = {}
        """The shards that this rank holds of DTensors. Their local tensors are in `tensors`."""
        self._names: dict[tuple[Any, ...], str] = {}
        self._storages: set[int] = set()

    def __call__(self, value: Any, place: str) -> Any:
        """Return a value as JSON. `place`: where it is, for example "optimizer/state/0"."""
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, Integral):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, Tensor):
            order = [] if is_dtensor(value) else order_in_memory(value)
            if order != sorted(order):
                return {"$order": [order, self._named(value.permute(order), place)]}
            return {"$tensor": self._named(value, place)}
        if isinstance(value, Counter):
            return {"$counter": self._dict(dict(value), place)}
        if isinstance(value, dict):
            return self._dict(value, place)
        if isinstance(value, list | tuple):
            items = [self(item, f"{place}/{index}") for index, item in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if type(value).__module__ == "numpy":
            return self._encode_numpy(value, place)
        remedy = "; use vars(args)" if isinstance(value, Namespace) else ""
        raise TypeError(
            f"save: {place} is of {type(value)}; a checkpoint holds tensors, arrays, numbers, "
            f"texts, bytes, lists, tuples and dicts of them{remedy}"
        )

    def _dict(self, value: dict[Any, Any], place: str) -> Any:
        if all(isinstance(key, str) for key in value) and not any(
            key.startswith("$") for key in value
        ):
            return {key: self(item, f"{place}/{key}") for key, item in value.items()}
        pairs = [
            [self(key, f"{place}, a key"), self(item, f"{place}/{key}")]
            for key, item in value.items()
        ]
        return {"$dict": pairs}

    def _encode_numpy(self, value: Any, place: str) -> Any:
        if isinstance(value, sys.modules["numpy"].generic):
            item = value.item()
            if isinstance(item, sys.modules["numpy"].generic):  # longdouble has no Python type
                raise TypeError(f"save: {place}: {type(item)} cannot be stored")
            return self(item, place)
        try:
            tensor = torch.from_numpy(value.copy())
        except (TypeError, ValueError, AttributeError) as error:
            raise TypeError(f"save: {place}: {error}") from None
        return {"$array": self._named(tensor, place)}

    def _named(self, tensor: Tensor, place: str) -> str:
        """Return the name of a tensor, which is its first place."""
        shard = shard_of(tensor, f"save: {place}") if is_dtensor(tensor) else None
        tensor = local(tensor.detach())
        if not tensor.is_meta and tensor.layout == torch.strided:
            tensor = tensor.resolve_conj().resolve_neg()
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta
        if not is_plain or tensor.dtype not in DTYPES:
            kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}, {tensor.device}"
            raise TypeError(f"save: {place}: a tensor of this kind cannot be stored: {kind}")
        storage = tensor.untyped_storage().data_ptr()
        view = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        key = (tensor.device, storage, view, shard)
        if storage and key in self._names:
            return self._names[key]
        while place in self.tensors:
            place += "~"  # {"a/b": 1, "a": {"b": 2}} has two values at one place
        self._names[key] = place
        # Tensors that share memory would share it in the file, so the second one is copied.
        self.tensors[place] = tensor.clone() if storage in self._storages else tensor
        self._storages.add(storage)
        if shard is not None:
            self.shards[place] = shard
        return place


def order_in_memory(tensor: Tensor) -> list[int]:
    """Return the dimensions of a dense tensor, the one with the largest stride first.

    Fused kernels of torch expect moments in the order of their parameter.
    """
    dims = list(range(tensor.dim()))
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return dims
    strides = tensor.stride()
    order = sorted(dims, key=lambda dim: (-strides[dim], dim))
    return order if tensor.permute(order).is_contiguous() else dims


def put_in_order(order: list[int], tensor: Tensor) -> Tensor:
    """Return a tensor with the dimensions that it had before it was permuted to this order."""
    return tensor.permute([order.index(dim) for dim in range(len(order))])


def kind_of(encoded: dict[str, Any], stored: dict[str, Any]) -> tuple[str, list[int]]:
    """Return the dtype and shape of an encoded tensor. `stored`: what the index says of tensors."""
    order, name = encoded.get("$order") or (None, encoded["$tensor"])
    dtype, shape = stored[name]["dtype"], stored[name]["shape"]
    return dtype, shape if order is None else [shape[order.index(dim)] for dim in range(len(order))]


def is_tensor(encoded: Any) -> bool:
    """Return True for an encoded tensor."""
    return isinstance(encoded, dict) and ("$tensor" in encoded or "$order" in encoded)


def decoded(value: Any, tensor_of: TensorOf) -> Any:
    """Return the value that was encoded.

    `tensor_of(name, order)` returns a tensor, permuted back from `order` unless that is None.
    """
    if isinstance(value, list):
        return [decoded(item, tensor_of) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, item),) = value.items()
        if kind in DECODERS:
            return DECODERS[kind](item, tensor_of)
    return {key: decoded(item, tensor_of) for key, item in value.items()}


def tensors_of(value: Any) -> list[str]:
    """Return the names of all tensors in an encoded value."""
    if isinstance(value, list):
        return [name for item in value for name in tensors_of(item)]
    if not isinstance(value, dict):
        return []
    for kind in ("$tensor", "$array"):
        if kind in value:
            return [value[kind]]
    if "$order" in value:
        return [value["$order"][1]]
    return tensors_of(list(value.values()))


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch has no dtype {name}")
    return found


DECODERS: dict[str, Callable[[Any, TensorOf], Any]] = {
    "$float": lambda item, _: float(item),
    "$tensor": lambda item, tensor_of: tensor_of(item, None),
    "$order": lambda item, tensor_of: tensor_of(item[1], item[0]),
    "$counter": lambda item, tensor_of: Counter(decoded(item, tensor_of)),
    "$tuple": lambda item, tensor_of: tuple(decoded(item, tensor_of)),
    "$dict": lambda item, tensor_of: {
        decoded(key, tensor_of): decoded(value, tensor_of) for key, value in item
    },
    "$bytes": lambda item, _: base64.b64decode(item),
    "$dtype": lambda item, _: dtype_of(item),
    "$device": lambda item, _: torch.device(item),
    "$array": lambda item, tensor_of: tensor_of(item, None).numpy(),
}
