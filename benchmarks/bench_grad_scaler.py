"""The cost of loss scaling per iteration: scale, unscale, clip, decide, update the scale.

    python benchmarks/bench_grad_scaler.py [--quick] [--device cuda] [--cases '*clip*/1000*']

The optimizers do nothing, so that only the scaler's part is timed. The fewest passes over the
gradients (reads, writes):

- step                   1, 1   unscale and inspect; the host decides
- step_clip              2, 1   clip_grad_norm_() to a norm that is exceeded, step()
- step_clip_below_limit  1, 1   the same within the norm: the second pass is not needed
- step_on_device         1, 0   an optimizer that takes scale and flag as tensors: inspect only

torch's scaler also writes if nothing is unscaled, and its clipping reads for the norm and always
scales: 8, 20, 20 and 8 bytes per float32 gradient. ampfuse moves 8, 16, 8 and 4.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ampfuse
import shapes
import torch
from bench_multi_tensor import NO_LIMIT, UNSCALED_LIMIT, Gradients
from harness import OURS, Case, Provider, Settings, Traffic, main
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad_norm_

K = shapes.K
# Lists that the host limits, lists that memory limits, and the list of a model.
LISTS: dict[str, Callable[[], list[shapes.Shape]]] = {
    **{f"{count}x{name}": (lambda count=count, size=size: [(size,)] * count)  # type: ignore[misc]
       for name, size in (("1K", K), ("64K", 64 * K)) for count in (1, 10, 100, 1000)},
    "resnet50": shapes.resnet50,
}  # fmt: skip
QUICK = ("10x1K", "100x1K", "1000x1K", "1000x64K")
ITEM = 4  # bytes of a float32


class Idle(torch.optim.Optimizer):
    """An optimizer whose step does nothing."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        super().__init__(params, {})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""


class IdleOnDevice(Idle):
    """An idle optimizer that declares that it skips by itself."""

    _step_supports_amp_scaling = True


@dataclass(frozen=True)
class Operation:
    """The calls of an iteration, and the passes over memory of its floor."""

    name: str
    reads: int
    writes: int
    optimizer: type[Idle] = Idle
    limit: float | None = None


OPERATIONS = [
    Operation("step", 1, 1),
    Operation("step_clip", 2, 1, limit=UNSCALED_LIMIT),
    Operation("step_clip_below_limit", 1, 1, limit=NO_LIMIT),
    Operation("step_on_device", 1, 0, optimizer=IdleOnDevice),
]


Clip = Callable[[Any, Idle, float], object]


def clip_as_with_torch(scaler: GradScaler, optimizer: Idle, limit: float) -> None:
    """Unscale and clip as training loops with torch do."""
    scaler.unscale_(optimizer)
    clip_grad_norm_(optimizer.param_groups[0]["params"], limit)


def iterate(
    scaler: Any,
    clip: Clip,
    operation: Operation,
    optimizer: Idle,
    gradients: Gradients,
) -> None:
    """Make the scaler's calls of a training loop, after backward()."""
    scaler.scale(gradients.found_inf)  # stands for the loss
    if operation.limit is not None:
        clip(scaler, optimizer, operation.limit)
    scaler.step(optimizer)
    scaler.update()


def providers(
    operation: Operation, shape_list: list[shapes.Shape], settings: Settings
) -> list[Provider]:
    gradients = Gradients(shape_list, torch.float32, settings.device)
    optimizer = operation.optimizer(gradients.parameters)
    writes = operation.writes > 0

    def provider(
        name: str,
        scaler: GradScaler,
        clip: Clip,
        moves: int,
    ) -> Provider:
        return Provider(
            name,
            partial(iterate, scaler, clip, operation, optimizer, gradients),
            gradients.restore if writes else lambda: None,
            gradients.tensors if writes else (),
            moves=moves,
        )

    clips = operation.limit is not None
    device = settings.device.type
    theirs = 20 if clips else 8
    ours = ITEM * (operation.reads + operation.writes + (operation.limit == UNSCALED_LIMIT))
    return [
        provider("torch", GradScaler(device), clip_as_with_torch, theirs),
        provider(OURS, ampfuse.GradScaler(device), ampfuse.GradScaler.clip_grad_norm_, ours),
    ]


def case(operation: Operation, shape: str) -> Case:
    return case_of(operation, shape, LISTS[shape]())


def case_of(operation: Operation, shape: str, shape_list: list[shapes.Shape]) -> Case:
    elements = shapes.element_count(shape_list)
    return Case(
        operation=operation.name,
        shape=shape,
        dtype=torch.float32,
        elements=elements,
        traffic=Traffic(
            read=ITEM * operation.reads * elements,
            written=ITEM * operation.writes * elements,
            against="update" if operation.writes else "read",
        ),
        memory=2 * ITEM * elements,
        setup=partial(providers, operation, shape_list),
        quick=shape in QUICK,
    )


if __name__ == "__main__":
    cases = [case(operation, shape) for shape in LISTS for operation in OPERATIONS]
    sys.exit(main("grad_scaler", cases))
