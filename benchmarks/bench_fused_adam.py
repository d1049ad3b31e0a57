"""AdamW: the bare update, and the whole step with unscaling, overflow check and clipping.

    python benchmarks/bench_fused_adam.py [--quick] [--device cuda] [--cases 'step/*/float32']

The floor is the fewest bytes per parameter (read, written), where a gradient has g bytes, a
parameter w and a moment s:

- update          float32   w + g + 2s, w + 2s          16, 12
- update          bfloat16  4 + g + 2s, 4 + 2s + w      14, 14   float32 masters; w is only written
- step            the same, and g is read once more     20, 12 and 16, 14
- step_remainder  bfloat16  w + 2 + 2g + 2s, w + 2 + 2s 16, 12   a master is w and 16 more bits
- step_smallest   the same with bfloat16 moments        12, 8
- step_8bit       the same with 8-bit moments           10, 6    a moment is a code and 1/32 unit
- step_stochastic the same without remainders           8, 4

For bfloat16, torch is measured by the loop of `optimizer_steps`.

Bytes per parameter that other libraries move for a whole step, counted in their sources of 2026:

- float32             torch 48: unscaling 8, norm 4, clipping 8, the fused update 28
- bfloat16, masters   DeepSpeed 70 (float16: 98), the loop on torch 60, Megatron-LM 46, apex and
                      TransformerEngine 40, llm.c and apex's DistributedFusedAdam 30
- with remainders     apex's DistributedFusedAdam 28
- bfloat16 moments    Megatron-LM on TransformerEngine, with remainders, 24

On a GPU, the bare updates of apex and TransformerEngine are measured if they are installed.
"""

import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import ampfuse
import shapes
import torch
from bench_multi_tensor import COMPILED_TENSORS, COMPILED_TENSORS_QUICK
from harness import Case, Provider, Settings, main
from optimizer_steps import Model, Operation, Steps, step_case

LEARNING_RATE = 1e-3
UPDATE = 28  # bytes per parameter of torch's fused update


class Peer:
    """The bare update of a FusedAdam with the interface of apex's."""

    def __init__(self, module: str, options: dict[str, object], model: Model) -> None:
        self.optimizer = import_module(module).FusedAdam(
            model.parameters, lr=LEARNING_RATE, weight_decay=0.01, adam_w_mode=True, **options
        )

    def __call__(self) -> None:
        """Take one step."""
        self.optimizer.step()


# apex has masters only for float16.
PEERS: dict[str, tuple[str, dict[torch.dtype, dict[str, object]]]] = {
    "apex": ("apex.optimizers", {torch.float32: {}}),
    "TransformerEngine": (
        "transformer_engine.pytorch.optimizers",
        {torch.float32: {}, torch.bfloat16: {"master_weights": True}},
    ),
}


REMAINDER: dict[str, object] = {"master_weights": "remainder"}
STOCHASTIC: dict[str, object] = {"master_weights": "stochastic"}
BF16_STATE: dict[str, object] = {"state_dtype": torch.bfloat16}
CODED: dict[str, object] = {"state_dtype": "8bit"}
OPERATIONS = [
    Operation("update", torch.float32, False, 16, 12, {}),
    Operation("step", torch.float32, True, 20, 12, {}),
    Operation("update", torch.bfloat16, False, 14, 14, {}),
    Operation("step", torch.bfloat16, True, 16, 14, {}),
    Operation("step_remainder", torch.bfloat16, True, 16, 12, REMAINDER),
    Operation("step_smallest", torch.bfloat16, True, 12, 8, BF16_STATE | REMAINDER),
    Operation("step_8bit", torch.bfloat16, True, 10, 6, CODED | REMAINDER),
    Operation("step_stochastic", torch.bfloat16, True, 8, 4, CODED | STOCHASTIC),
]
QUICK = ("64x1M", "10000x64", "resnet50")


def providers(
    operation: Operation, shape_list: list[shapes.Shape], settings: Settings
) -> list[Provider]:
    steps = Steps(operation, shape_list, settings)
    adamw = partial(torch.optim.AdamW, lr=LEARNING_RATE)

    def compiled() -> Provider:
        limit = COMPILED_TENSORS_QUICK if settings.quick else COMPILED_TENSORS
        if len(shape_list) > limit:
            too_many = f"{len(shape_list)} tensors to unroll; compiled up to {limit}"
            return Provider("torch.compile", lambda: None, skipped=too_many)
        make = partial(adamw, foreach=True)
        return steps.provider(
            "torch.compile", lambda m: torch.compile(steps.torch_step(m, make), dynamic=False)
        )

    def peer(name: str) -> Provider:
        module, options = PEERS[name]
        if not find_spec(module.partition(".")[0]):
            return Provider(name, lambda: None, skipped="not installed")
        make = partial(Peer, module, options[operation.dtype])
        return steps.provider(name, make, operation.floor)

    return [
        steps.of_torch("torch fused", partial(adamw, fused=True), UPDATE),
        steps.of_torch("torch foreach", partial(adamw, foreach=True)),
        compiled(),
        *(
            peer(name)
            for name, (_, options) in PEERS.items()
            if settings.device.type == "cuda" and not operation.whole and operation.dtype in options
        ),
        steps.ours(partial(ampfuse.AdamW, lr=LEARNING_RATE)),
    ]


def case(operation: Operation, shape: str) -> Case:
    return case_of(operation, shape, (shapes.REGULAR | shapes.MODELS)[shape]())


def case_of(operation: Operation, shape: str, shape_list: list[shapes.Shape]) -> Case:
    is_quick = shape in QUICK
    return step_case(operation, shape, shape_list, providers, moments=2, is_quick=is_quick)


SHAPES = ["1x64M", "64x1M", "1024x64K", "10000x64", "resnet50", "gpt2-124m"]

if __name__ == "__main__":
    cases = [case(operation, shape) for shape in SHAPES for operation in OPERATIONS]
    sys.exit(main("fused_adam", cases))
