"""A dry run: operators compute shapes, but no floating-point numbers.

Results of operators are tensors of the right shape, full of zeros that take no physical memory
until someone writes to them. So a step of a large model takes a second on any machine, and the
program sees tensors like any others.
"""

import mmap
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

from ampfuse._nested import tensors_in

# The rule for this operator's shapes leaves out the memory that it keeps for backward.
ALWAYS_RUN = ("aten::mkldnn_rnn_layer",)

# Smaller results are ordinary tensors: a mapping takes whole pages, and a call of the system.
SMALLEST_MAPPING = 64 * 1024


def run_dry(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], fake_mode: FakeTensorMode
) -> Any:
    """Return the results of an operator, which runs, or whose shapes alone are computed.

    These run: operators on a GPU, views, operators on numbers (tensors with one element), and
    operators without floating-point tensors. The last two decide what a program does next, for
    example which rows it takes from a dataset, or whether it skips a step.
    """
    tensors = list(tensors_in((args, kwargs)))
    if not hasattr(operator, "_schema"):  # a higher-order operator, which calls others
        return operator(*args, **kwargs)
    schema = operator._schema
    if _must_run(operator, tensors):
        return operator(*args, **kwargs)
    are_new = [result.alias_info is None for result in schema.returns]
    has_out = operator.namespace == "aten" and any(one.is_out for one in schema.arguments)
    if schema.is_mutable and not any(are_new) and not has_out:
        return _written(schema, args, kwargs)
    try:
        with fake_mode:
            fakes = {
                id(one): torch.empty_strided(
                    one.shape, one.stride(), dtype=one.dtype, device=one.device
                )
                for one in tensors
            }
            given = tree_map(lambda x: fakes.get(id(x), x), (args, kwargs))
            results = operator(*given[0], **given[1])
    except Exception:  # there is no rule for the shape, or it depends on numbers
        return operator(*args, **kwargs)
    if has_out:
        for tensor in tensors:
            if tensor.shape != fakes[id(tensor)].shape:
                tensor.resize_(fakes[id(tensor)].shape).zero_()
        return _written(schema, args, kwargs)
    found = list(tensors_in(results))
    if any(result.layout != torch.strided for result in found):
        return operator(*args, **kwargs)
    inputs = {fake.untyped_storage()._cdata for fake in fakes.values()}
    is_view = any(result.untyped_storage()._cdata in inputs for result in found)
    is_large = any(
        has_floats(one) and one.untyped_storage().nbytes() >= SMALLEST_MAPPING for one in found
    )
    is_constant = not tensors and not is_large
    if is_view or (is_constant and not schema.name.startswith("aten::empty")):
        return operator(*args, **kwargs)
    made = tree_map(lambda x: _zeros_like(x) if isinstance(x, Tensor) else x, results)
    return made.fill_(True) if schema.name == "aten::isfinite" else made


def _must_run(operator: Any, tensors: list[Tensor]) -> bool:
    schema = operator._schema
    if torch.Tag.inplace_view in operator.tags:
        return True
    if any(tensor.device.type != "cpu" or tensor.layout != torch.strided for tensor in tensors):
        return True
    aliases = [argument.alias_info for argument in schema.arguments]
    is_view = any(alias is not None and not alias.is_write for alias in aliases)
    has_nothing = not schema.returns and not tensors
    returns = {result.alias_info is None for result in schema.returns}
    is_mixed = len(returns) == 2  # some results are new, and some are arguments
    if is_view or is_mixed or has_nothing or schema.name in ALWAYS_RUN:
        return True
    is_about_numbers = all(tensor.numel() <= 1 for tensor in tensors)
    return len(tensors) > 0 and (is_about_numbers or not any(map(has_floats, tensors)))


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an in-place operator returns after it has written to them."""
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    by_letter = {
        _letter(argument): given.get(argument.name)
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    for tensor in tensors_in(list(by_letter.values())):
        if not has_floats(tensor):
            tensor.zero_()  # indices from floats, which may have been undefined before
    written = [by_letter[_letter(result)] for result in schema.returns]
    return None if not written else written[0] if len(written) == 1 else tuple(written)


def _letter(value: Any) -> str | None:
    """Return the letter that marks an argument and the results that are the same tensor."""
    return next(iter(value.alias_info.before_set), None)


def has_floats(tensor: Tensor) -> bool:
    """Return True for a tensor of floating-point or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def _zeros_like(fake: Tensor) -> Tensor:
    """Return zeros of the shape and strides of a fake tensor, without touching their memory."""
    storage = zeros(fake.untyped_storage().nbytes()).untyped_storage()
    result = torch.empty(0, dtype=fake.dtype)
    return result.set_(storage, fake.storage_offset(), fake.shape, fake.stride())


def zeros(count: int) -> Tensor:
    """Return this many bytes; a large number takes no physical memory until it is written."""
    if count < SMALLEST_MAPPING:
        return torch.zeros(count, dtype=torch.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return torch.frombuffer(mmap.mmap(-1, count, flags=flags), dtype=torch.uint8)
