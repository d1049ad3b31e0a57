"""AdamW: the bare update, and the whole step with unscaling, overflow check and clipping.

    python benchmarks/bench_fused_adam.py [--quick] [--device cuda] [--cases 'step/*/float32']

The floor is the fewest bytes per parameter (read, written), where a gradient has g bytes, a
parameter w and a moment s:

- update          float32   w + g + 2s, w + 2s          16, 12
- update          bfloat16  4 + g + 2s, 4 + 2s + w      14, 14   float32 masters; w is only written
- step            the same, and g is read once more     20, 12 and 16, 14
- step_remainder  bfloat16  w + 2 + 2g + 2s, w + 2 + 2s 16, 12   a master is w and 16 more bits
- step_smallest   the same with bfloat16 moments        12, 8

torch has no masters. For bfloat16 it is measured by the usual loop around fused AdamW, which casts
the gradients to float32, unscales, clips and steps a float32 copy, and casts that back.

Bytes per parameter that other libraries move for a whole step, counted in their sources of 2026:

- float32             torch 48: unscaling 8, norm 4, clipping 8, the fused update 28
- bfloat16, masters   DeepSpeed 70 (float16: 98), the loop on torch 60, Megatron-LM 46, apex and
                      TransformerEngine 40, llm.c and apex's DistributedFusedAdam 30
- with remainders     apex's DistributedFusedAdam 28
- bfloat16 moments    Megatron-LM on TransformerEngine, with remainders, 24

On a GPU, the bare updates of apex and TransformerEngine are measured if they are installed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import ampfuse
import shapes
import torch
from bench_multi_tensor import COMPILED_TENSORS, COMPILED_TENSORS_QUICK, filled
from harness import OURS, Case, Provider, Settings, Traffic, main
from torch.nn.utils import clip_grad_norm_

SCALE = 2.0**16  # torch's initial loss scale
LIMIT = 1.0
LEARNING_RATE = 1e-3


class Model:
    """Parameters with gradients. Each provider has its own, with the same initial values."""

    def __init__(self, shape_list: list[shapes.Shape], dtype: torch.dtype, device: torch.device):
        noise = torch.randn(shapes.M, device=device).to(dtype)
        self.parameters: list[torch.Tensor] = [
            torch.nn.Parameter(filled(shape, noise)) for shape in shape_list
        ]
        self.scale = torch.tensor(SCALE, device=device)
        self.inv_scale = torch.tensor(1 / SCALE, device=device)

    def take(self, grads: list[torch.Tensor]) -> "Model":
        """Set the parameters' gradients; return self."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad
        return self


class TorchStep:
    """unscale_, clip_grad_norm_ and AdamW on float32 parameters, or the update alone.

    Only the fused implementation skips; the others would have to wait for the flag.
    """

    def __init__(self, model: Model, whole: bool, fused: bool) -> None:
        self.model, self.whole, self.fused = model, whole, fused
        self.parameters = model.parameters
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LEARNING_RATE, fused=fused, foreach=not fused
        )

    def __call__(self) -> None:
        """Take one step."""
        if self.whole:
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            found_inf = torch.zeros((), device=self.model.scale.device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, self.model.inv_scale)
            clip_grad_norm_(self.parameters, LIMIT)
            if self.fused:
                self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self.optimizer.step()


class TorchMasters(TorchStep):
    """The loop that people write to train a bfloat16 model with float32 masters."""

    def __init__(self, model: Model, whole: bool, fused: bool) -> None:
        masters = Model([], model.parameters[0].dtype, model.scale.device)
        masters.parameters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters]
        super().__init__(masters, whole, fused)
        self.copies = model.parameters

    @torch.no_grad()
    def __call__(self) -> None:
        """Take one step."""
        for master, copy in zip(self.parameters, self.copies, strict=True):
            master.grad = None if copy.grad is None else copy.grad.float()
        super().__call__()
        torch._foreach_copy_(self.copies, self.parameters)


class AmpfuseStep:
    """The optimizer's own unscaling, clipping and overflow check."""

    def __init__(self, model: Model, whole: bool, **options: object) -> None:
        self.optimizer = ampfuse.AdamW(
            model.parameters,
            lr=LEARNING_RATE,
            max_grad_norm=LIMIT if whole else None,
            **options,  # type: ignore[arg-type]
        )
        if whole:
            self.optimizer.grad_scale = model.scale  # type: ignore[attr-defined]

    def __call__(self) -> None:
        """Take one step."""
        self.optimizer.step()


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


@dataclass(frozen=True)
class Operation:
    """An operation, and the bytes per element of its floor."""

    name: str
    dtype: torch.dtype
    whole: bool
    read: int
    written: int
    ours: dict[str, object]

    @property
    def floor(self) -> int:
        """The bytes per element of the floor."""
        return self.read + self.written


BF16_STATE = {"master_weights": "remainder", "state_dtype": torch.bfloat16}
OPERATIONS = [
    Operation("update", torch.float32, False, 16, 12, {}),
    Operation("step", torch.float32, True, 20, 12, {}),
    Operation("update", torch.bfloat16, False, 14, 14, {}),
    Operation("step", torch.bfloat16, True, 16, 14, {}),
    Operation("step_remainder", torch.bfloat16, True, 16, 12, {"master_weights": "remainder"}),
    Operation("step_smallest", torch.bfloat16, True, 12, 8, BF16_STATE),
]
QUICK = ("64x1M", "10000x64", "resnet50")


def providers(
    operation: Operation, shape_list: list[shapes.Shape], settings: Settings
) -> list[Provider]:
    def model() -> Model:
        torch.manual_seed(0)
        return Model(shape_list, operation.dtype, settings.device)

    kept = model().parameters
    grads = [parameter.detach().clone() for parameter in kept]

    @torch.no_grad()
    def restore() -> None:
        if operation.whole and operation.dtype == torch.float32:  # torch writes them in place
            torch._foreach_copy_(grads, kept)

    def provider(
        name: str,
        make: Callable[[Model], Callable[[], None]],
        skip: str = "",
        moves: float | None = None,
    ) -> Provider:
        if skip:
            return Provider(name, lambda: None, skipped=skip)
        of_this = model().take(grads)
        return Provider(name, make(of_this), restore, of_this.parameters, moves=moves)

    limit = COMPILED_TENSORS_QUICK if settings.quick else COMPILED_TENSORS
    too_many = f"{len(shape_list)} tensors to unroll; compiled up to {limit}"
    skip = too_many if len(shape_list) > limit else ""
    whole = operation.whole
    theirs = TorchStep if operation.dtype == torch.float32 else TorchMasters
    # Bytes of casts, of unscaling, norm and clipping, and of the update.
    moved = (12 if theirs is TorchMasters else 0) + (20 if whole else 0) + 28

    def peer(name: str) -> Provider:
        module, options = PEERS[name]
        missing = "" if find_spec(module.partition(".")[0]) else "not installed"
        make = partial(Peer, module, options[operation.dtype])
        return provider(name, make, missing, moves=operation.floor)

    return [
        provider("torch fused", lambda m: theirs(m, whole, fused=True), moves=moved),
        provider("torch foreach", lambda m: theirs(m, whole, fused=False)),
        provider(
            "torch.compile",
            lambda m: torch.compile(theirs(m, whole, fused=False), dynamic=False),
            skip,
        ),
        *(
            peer(name)
            for name, (_, options) in PEERS.items()
            if settings.device.type == "cuda" and not whole and operation.dtype in options
        ),
        provider(OURS, lambda m: AmpfuseStep(m, whole, **operation.ours), moves=operation.floor),
    ]


def case(operation: Operation, shape: str) -> Case:
    return case_of(operation, shape, (shapes.REGULAR | shapes.MODELS)[shape]())


def case_of(operation: Operation, shape: str, shape_list: list[shapes.Shape]) -> Case:
    elements = shapes.element_count(shape_list)
    return Case(
        operation=operation.name,
        shape=shape,
        dtype=operation.dtype,
        elements=elements,
        traffic=Traffic(operation.read * elements, operation.written * elements, "update"),
        # Parameters, moments and masters of each provider; gradients, their copy, temporaries.
        memory=elements * (4 * (operation.dtype.itemsize + 12) + 16),
        setup=partial(providers, operation, shape_list),
        quick=shape in QUICK,
    )


SHAPES = ["1x64M", "64x1M", "1024x64K", "10000x64", "resnet50", "gpt2-124m"]

if __name__ == "__main__":
    cases = [case(operation, shape) for shape in SHAPES for operation in OPERATIONS]
    sys.exit(main("fused_adam", cases))
