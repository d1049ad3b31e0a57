"""The shard of the classes that a rank of a process group holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from ampfuse._graphs import eager_only

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # missing in some builds of torch


def vocab_shard(
    process_group: ProcessGroup, weight: Tensor, first_class: int | None, num_classes: int | None
) -> list[int]:
    """Return [ranks, first class, classes]; by default for equal shards in the order of ranks."""
    _check_group(process_group)
    if (first_class is None) != (num_classes is None):
        raise ValueError("first_class, num_classes: expected both or neither")
    _check_classes(first_class, num_classes)
    size, classes = process_group.size(), weight.shape[0]
    if first_class is None or num_classes is None:
        first_class, num_classes = process_group.rank() * classes, size * classes
    return [size, first_class, num_classes]


@eager_only
def _check_classes(first_class: int | None, num_classes: int | None) -> None:
    for name, number in (("first_class", first_class), ("num_classes", num_classes)):
        if number is not None and not isinstance(number, int):
            raise TypeError(f"{name}: expected an int, got {type(number).__name__}")


@eager_only
def _check_group(process_group: ProcessGroup) -> None:
    if not hasattr(process_group, "group_name"):
        raise TypeError(
            "process_group: expected a torch.distributed.ProcessGroup that this rank belongs to, "
            f"got {type(process_group).__name__}"
        )
