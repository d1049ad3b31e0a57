"""The loss of a model's last layer with all gradients: those of hidden states and weight.

Cases are rows x features x classes. On a CPU the models' features are divided by eight, and a layer
of 512 features is added.

    python benchmarks/bench_linear_cross_entropy.py [--quick] [--device cuda] [--cases 'train/*']

The floor is three products, 6·rows·features·classes multiplications and additions: logits, and the
gradients of hidden states and weight. The ceiling is the rate of one product of large matrices.

- train           mean loss and all gradients
- train_frozen    the same with a weight that requires no grad: two products
- train_none      one loss per row: ampfuse keeps no logits, and computes them again
- loss            without gradients: one product

Memory is the peak of what a call holds in addition to its arguments, gradients included.

- torch           logits in the dtype of the layer, cross-entropy of `logits.float()`
- torch.compile   the same, compiled
- torch, chunks   the same for 1024 rows at a time, each recomputed in its backward
                  (torch.utils.checkpoint), as training libraries do without a kernel of their own
- ampfuse, tiles  all rows, and 4096 classes at a time: the least memory

On a GPU, Liger, cut-cross-entropy and quack are measured if they are installed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import ampfuse
import torch
from harness import OURS, Case, Products, Provider, Settings, main
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Criterion = Callable[[Tensor, Tensor, Tensor], Tensor]  # takes hidden states, weight and targets

TILED = f"{OURS}, tiles"
ROWS_AT_A_TIME = 1024  # in the loop of `torch, chunks`


@dataclass(frozen=True)
class Operation:
    """A computation of the loss, and its dtypes."""

    name: str
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    backward: bool = True
    frozen: bool = False
    reduction: str = "mean"

    @property
    def products(self) -> int:
        """The number of products at the floor."""
        return 1 + self.backward * (2 - self.frozen)


OPERATIONS = [
    Operation("train", (torch.bfloat16, torch.float32)),
    Operation("train_frozen", frozen=True),
    Operation("train_none", reduction="none"),
    Operation("loss", backward=False),
]


class Batch:
    """Hidden states, weight and targets."""

    def __init__(
        self,
        operation: Operation,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        torch.manual_seed(0)
        rows, features, classes = shape
        self.operation = operation
        self.hidden = torch.empty(rows, features, dtype=dtype, device=device).uniform_(-1, 1)
        self.weight = torch.empty(classes, features, dtype=dtype, device=device).uniform_(-1, 1)
        self.weight /= features**0.5
        self.target = torch.randint(classes, (rows,), device=device)
        self.hidden.requires_grad_()
        self.weight.requires_grad_(not operation.frozen)

    def run(self, criterion: Criterion) -> tuple[Tensor, ...]:
        """Return the loss and newly allocated gradients, as the first after zero_grad() are."""
        if not self.operation.backward:
            with torch.no_grad():
                return (criterion(self.hidden, self.weight, self.target),)
        loss = criterion(self.hidden, self.weight, self.target)
        upstream = torch.full_like(loss, 1 / loss.numel())
        inputs = [tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad]
        return loss, *torch.autograd.grad(loss, inputs, upstream)


def whole(reduction: str, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    logits = functional.linear(hidden, weight)
    return functional.cross_entropy(logits.float(), target, reduction=reduction)


def by_chunk(reduction: str, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    losses = [
        checkpoint(
            partial(whole, "none" if reduction == "none" else "sum"),
            hidden[first : first + ROWS_AT_A_TIME],
            weight,
            target[first : first + ROWS_AT_A_TIME],
            use_reentrant=False,
        )
        for first in range(0, len(hidden), ROWS_AT_A_TIME)
    ]
    return torch.cat(losses) if reduction == "none" else sum(losses) / len(hidden)


def liger(reduction: str) -> Criterion:
    function = import_module("liger_kernel.transformers.functional")
    linear = function.liger_fused_linear_cross_entropy
    return lambda hidden, weight, target: linear(hidden, weight, target, reduction=reduction)


def cut_cross_entropy(reduction: str) -> Criterion:
    return partial(import_module("cut_cross_entropy").linear_cross_entropy, reduction=reduction)


def quack(reduction: str) -> Criterion:
    function = import_module("quack.linear_cross_entropy").chunked_linear_cross_entropy
    return partial(function, reduction=reduction)


PEERS: dict[str, tuple[str, Callable[[str], Criterion]]] = {
    "Liger": ("liger_kernel", liger),
    "CCE": ("cut_cross_entropy", cut_cross_entropy),
    "quack": ("quack", quack),
}


def providers(
    operation: Operation, shape: tuple[int, int, int], dtype: torch.dtype, settings: Settings
) -> list[Provider]:
    batch = Batch(operation, shape, dtype, settings.device)
    reduction = operation.reduction
    # bfloat16 logits and gradients have relative errors of 2^-9, which differ between providers.
    slack = 2**-5 if dtype == torch.bfloat16 else 2**-10

    def provider(name: str, criterion: Criterion) -> Provider:
        return Provider(name, partial(batch.run, criterion), slack=slack)

    def peer(name: str) -> Provider:
        module, criterion = PEERS[name]
        if not find_spec(module):
            return Provider(name, lambda: None, skipped="not installed")
        return provider(name, criterion(reduction))

    eager = partial(whole, reduction)
    ours = partial(ampfuse.linear_cross_entropy, reduction=reduction)
    tiled = [] if reduction == "none" else [provider(TILED, partial(ours, chunk_classes=4096))]
    return [
        provider("torch", eager),
        provider("torch.compile", torch.compile(eager, dynamic=False)),
        provider("torch, chunks", partial(by_chunk, reduction)),
        *(peer(name) for name in PEERS if settings.device.type == "cuda"),
        provider(OURS, ours),
        *tiled,
    ]


def case(operation: Operation, shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    rows, features, classes = shape
    return Case(
        operation=operation.name,
        shape="x".join(map(str, shape)),
        dtype=dtype,
        elements=rows * classes,
        traffic=Products(2 * operation.products * rows * features * classes, dtype),
        # Logits, their copies and gradients in both dtypes; weights and their gradients.
        memory=20 * rows * classes + 12 * classes * features,
        setup=partial(providers, operation, shape, dtype),
        quick=shape in QUICK and operation.name == "train" and dtype == torch.bfloat16,
        weighs_memory=True,
    )


# Features and classes of GPT-2, Llama-3-8B and Gemma-2-2B.
LAYERS = [(768, 50257), (4096, 128256), (2304, 256000)]
GPU = [(rows, *layer) for layer in LAYERS for rows in (1024, 4096, 16384)]
CPU = [(rows, 512, 50257) for rows in (256, 1024, 4096)]
CPU += [(rows, features // 8, classes) for features, classes in LAYERS for rows in (256, 1024)]
QUICK = [(1024, 96, 50257), (4096, 4096, 128256)]

if __name__ == "__main__":
    cases = [
        case(operation, shape, dtype)
        for shape in (GPU if torch.cuda.is_available() else CPU)
        for operation in OPERATIONS
        for dtype in operation.dtypes
    ]
    sys.exit(main("linear_cross_entropy", cases))
