"""SGD with momentum: the bare update, and the step with unscaling, overflow check and clipping.

    python benchmarks/bench_fused_sgd.py [--quick] [--device cuda] [--cases 'step/*/float32']

The floor is the fewest bytes per parameter (read, written), where a gradient has g bytes, a
parameter w and the momentum 4:

- update  float32   w + g + 4, w + 4            12, 8
- step    float32   the same, and g once more   16, 8
- step    bfloat16  4 + 2g + 4, 4 + 4 + w       12, 10   float32 masters; w is only written

In float32, torch moves 20 bytes in the fused update, and 40 in the whole step. For bfloat16, it is
measured by the loop of `optimizer_steps`.
"""

import sys
from functools import partial
from typing import Any

import ampfuse
import shapes
import torch
from harness import Case, Provider, Settings, main
from optimizer_steps import Operation, Steps, step_case

# The options with which ResNets are trained.
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}
UPDATE = 20  # bytes per parameter of torch's fused update

OPERATIONS = [
    Operation("update", torch.float32, False, 12, 8, {}),
    Operation("step", torch.float32, True, 16, 8, {}),
    Operation("step", torch.bfloat16, True, 12, 10, {}),
]
QUICK = ("64x1M", "10000x64", "resnet50")


def providers(
    operation: Operation, shape_list: list[shapes.Shape], settings: Settings
) -> list[Provider]:
    steps = Steps(operation, shape_list, settings)
    sgd = partial(torch.optim.SGD, **OPTIONS)
    return [
        steps.of_torch("torch fused", partial(sgd, fused=True), UPDATE),
        steps.of_torch("torch foreach", partial(sgd, foreach=True)),
        steps.of_torch("torch for-loop", partial(sgd, foreach=False)),
        steps.ours(partial(ampfuse.SGD, **OPTIONS)),
    ]


def case(operation: Operation, shape: str) -> Case:
    shape_list = (shapes.REGULAR | shapes.MODELS)[shape]()
    is_quick = shape in QUICK
    return step_case(operation, shape, shape_list, providers, moments=1, is_quick=is_quick)


SHAPES = ["1x64M", "64x1M", "10000x64", "resnet50"]

if __name__ == "__main__":
    cases = [case(operation, shape) for shape in SHAPES for operation in OPERATIONS]
    sys.exit(main("fused_sgd", cases))
