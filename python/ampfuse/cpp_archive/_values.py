"""The values in `data.pkl` of a C++ archive, read as data.

TorchScript writes few of pickle's instructions and names few functions; this reader supports only
these. A subclass of `pickle.Unpickler`, even one that finds only a few names, would let a file call
`__setstate__` of tensors and change the attributes of functions.
"""

import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

_DTYPES = {
    "torch FloatStorage": torch.float32,
    "torch DoubleStorage": torch.float64,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch ComplexFloatStorage": torch.complex64,
    "torch ComplexDoubleStorage": torch.complex128,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ShortStorage": torch.int16,
    "torch CharStorage": torch.int8,
    "torch ByteStorage": torch.uint8,
    "torch BoolStorage": torch.bool,
}


class Module(dict[str, Any]):
    """The attributes of a module by name."""


class UnexpectedError(Exception):
    """The archive cannot be read; the message describes what was found instead."""


class _Elements(NamedTuple):
    """A storage and the dtype of its elements. The device that the file names is ignored."""

    dtype: torch.dtype
    storage: UntypedStorage


class _Stack(list[Any]):
    """The stack of values that later instructions take."""

    def __init__(self) -> None:
        super().__init__()
        self._marks: list[int] = []

    def mark(self) -> None:
        self._marks.append(len(self))

    def pop_to_mark(self) -> list[Any]:
        return self.pop_from(self._marks.pop())

    def pop_from(self, start: int) -> list[Any]:
        values = self[start:]
        del self[start:]
        return values


def read_values(pickled: bytes, storage: Callable[[str], UntypedStorage]) -> Any:
    """Return the value that was pickled; `storage` returns a tensor's storage by its key."""
    stack, memo = _Stack(), {}
    for instruction, argument, _ in pickletools.genops(pickled):
        match instruction.name:
            case "MARK":
                stack.mark()
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "GLOBAL":
                stack.append(argument)  # "GLOBAL" names a function or a class: "module name"
            case "NONE":
                stack.append(None)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(instruction.name == "NEWTRUE")
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(stack.pop_from(-int(instruction.name[-1]))))
            case "TUPLE":
                stack.append(tuple(stack.pop_to_mark()))
            case "EMPTY_LIST":
                stack.append([])
            case "APPENDS":
                items = stack.pop_to_mark()
                list.extend(stack[-1], items)
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEMS":
                items = stack.pop_to_mark()
                dict.update(stack[-1], _entries(items[::2], items[1::2]))
            case "BINPERSID":
                stack.append(_elements(stack.pop(), storage))
            case "NEWOBJ":
                stack.append(_module(*stack.pop_from(-2)))
            case "BUILD":
                attributes = stack.pop()
                stack[-1].update(**attributes)
            case "REDUCE":
                stack.append(_result(*stack.pop_from(-2)))
            case "PROTO" | "STOP":
                pass
            case _:
                raise UnexpectedError(f"one with pickle's instruction {instruction.name}")
    return stack.pop()


def _text(value: Any) -> str:
    """Return a string; raise for other types, since nested shared tuples take forever to hash."""
    if not isinstance(value, str):
        raise UnexpectedError(f"one with a value of type {type(value).__name__} as a name")
    return value


def _entries(keys: list[Any], values: list[Any]) -> dict[str, Any]:
    return dict(zip(map(_text, keys), values, strict=True))


def _module(name: Any, _: tuple[()]) -> Module:
    if not _text(name).startswith(("__torch__ ", "__torch__.")):
        raise UnexpectedError(f"one with an object of {name}")
    return Module()


def _result(name: Any, arguments: tuple[Any, ...]) -> Any:
    """Return what the named function returns, for the functions that TorchScript names."""
    match _text(name):
        case "torch._utils _rebuild_tensor_v2":
            return _tensor(*arguments)
        case "collections OrderedDict" if not arguments:  # a tensor's hooks
            return {}
        case (
            "torch.jit._pickle build_intlist"
            | "torch.jit._pickle build_doublelist"
            | "torch.jit._pickle build_boollist"
            | "torch.jit._pickle build_tensorlist"
            | "torch.jit._pickle restore_type_tag"
        ):
            return arguments[0]
    raise UnexpectedError(f"one with a call of {name}")


def _elements(persistent_id: Any, storage: Callable[[str], UntypedStorage]) -> _Elements:
    _, storage_type, key, _, _ = persistent_id
    return _Elements(_DTYPES[_text(storage_type)], storage(_text(key)))


def _tensor(
    elements: _Elements,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    _requires_grad: bool,
    _hooks: dict[str, Any],
) -> Tensor:
    dtype, storage = elements
    if not all(type(number) is int and number >= 0 for number in (offset, *size, *stride)):
        raise UnexpectedError("one with a negative or non-integer size, stride or offset")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    count = storage.nbytes() // dtype.itemsize
    if 0 not in size and last >= count:  # set_() would enlarge the storage
        raise UnexpectedError(
            f"one with a tensor of size {size}, strides {stride} and offset {offset} in a storage "
            f"of {count} elements"
        )
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)
