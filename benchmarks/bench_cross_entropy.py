"""Cross-entropy of logits: the loss, and the loss with the logits' gradient.

Logits are [rows, classes], or images [batch, classes, height, width].

    python benchmarks/bench_cross_entropy.py [--quick] [--device cuda] [--cases 'train/*x50257/*']

The floor is the fewest bytes per logit (read, written), where a logit has i bytes. Targets and
losses are not counted:

- loss             i, 0   without gradients, as in the evaluation of a model
- train            i, i   mean loss and the gradient of leaves
- train_smoothing  i, i   the same with label_smoothing
- train_in_place   i, i   the gradient may replace the logits
- train_none       i, i   one loss per row, so the gradient is known only in backward; ampfuse keeps
                          the logits and reads them again: 2i, i

float16 is trained with a loss scale of 65536, which is passed to ampfuse before backward.

Bytes per 16-bit logit that other libraries move for training, counted in their sources of 2026:

- torch, logits.float()  36   casts 12, log_softmax 8, zeros 4 (one number per row is then written),
                              and log_softmax's backward 12; label smoothing 12 more
                         48   on a GPU whose shared memory does not hold a row: read repeatedly
- torch, bfloat16        12   or 18, without casts; but log-probabilities are bfloat16, too: their
                              error, up to 1/32, is the relative error of the gradient
- torch.compile          6-8  maximum and sum of a row from one read or from two
- TransformerEngine 14-22, Megatron-LM 36-52, apex 8, flash-attn and quack 6
- Liger                  6    always in place; 10 if the upstream gradient is not 1

On a GPU, quack and (in place) Liger are measured if they are installed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import prod

import ampfuse
import torch
from harness import OURS, Case, Provider, Settings, Traffic, main
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

Criterion = Callable[[Tensor, Tensor], Tensor]  # takes logits and targets

SCALE = 2.0**16  # torch's initial loss scale
SHARED_MEMORY = 48 * 2**10  # bytes that a block on a GPU has by default
# The agreement to expect of bfloat16 log-probabilities: below -8 their spacing is 2^-4, and results
# that are computed from them are rounded a few times more.
ROUGH = 2**-3


@dataclass(frozen=True)
class Operation:
    """A computation of the loss, and its dtypes."""

    name: str
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16,)
    backward: bool = True
    in_place: bool = False
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @property
    def options(self) -> dict[str, object]:
        """The options of the loss by torch's names."""
        return {"reduction": self.reduction, "label_smoothing": self.label_smoothing}


OPERATIONS = [
    Operation("loss", (torch.bfloat16, torch.float32), backward=False),
    Operation("train", (torch.bfloat16, torch.float16, torch.float32)),
    Operation("train_smoothing", label_smoothing=0.1),
    Operation("train_in_place", in_place=True),
    Operation("train_none", reduction="none"),
]


class Layer(torch.autograd.Function):
    """Acts as a layer that computed `logits` from `source`, so that they may be overwritten."""

    @staticmethod
    def forward(ctx: FunctionCtx, source: Tensor, logits: Tensor) -> Tensor:
        """Return logits that are not a leaf."""
        return logits.detach()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits as that of the source."""
        return grad, None


class Batch:
    """Logits, targets, and the upstream gradient."""

    def __init__(
        self,
        operation: Operation,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        torch.manual_seed(0)
        self.operation = operation
        # Keep the logits close together: a probability near label_smoothing / classes has a
        # gradient near zero, and torch's float32 leaves too few digits of it to compare.
        self.leaf = torch.empty(shape, dtype=dtype, device=device).uniform_(-1, 1).requires_grad_()
        self.target = torch.randint(shape[1], (shape[0], *shape[2:]), device=device)
        self.target.view(-1)[0] = 0  # so that the compared numbers include a target's
        self.grad_scale = torch.tensor(SCALE, device=device) if dtype == torch.float16 else None
        one = torch.ones((), device=device)
        self.upstream = one if self.grad_scale is None else self.grad_scale
        if operation.reduction == "none":
            weight = 0.5 + torch.rand(self.target.shape, device=device)
            self.upstream = self.upstream * weight / self.target.numel()
        self.overwritten = self.leaf.detach().clone() if operation.in_place else None

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the logits."""
        if self.overwritten is not None:
            self.overwritten.copy_(self.leaf)

    def run(self, criterion: Criterion) -> tuple[Tensor, ...]:
        """Return the loss and a newly allocated gradient, as the first one after zero_grad() is."""
        if not self.operation.backward:
            with torch.no_grad():
                return (criterion(self.leaf, self.target),)
        logits = self.leaf
        if self.overwritten is not None:
            logits = Layer.apply(self.leaf, self.overwritten)  # type: ignore[no-untyped-call]
        loss = criterion(logits, self.target)
        (grad,) = torch.autograd.grad(loss, self.leaf, self.upstream.to(loss.dtype))
        return loss, grad


def torch_criterion(operation: Operation, cast: bool) -> Criterion:
    def criterion(logits: Tensor, target: Tensor) -> Tensor:
        logits = logits.float() if cast else logits
        return functional.cross_entropy(logits, target, **operation.options)  # type: ignore[arg-type]

    return criterion


def ampfuse_criterion(batch: Batch) -> Criterion:
    operation = batch.operation
    function = ampfuse.cross_entropy_ if operation.in_place else ampfuse.cross_entropy
    grad_scale = batch.grad_scale
    return partial(function, grad_scale=grad_scale, **operation.options)  # type: ignore[arg-type]


def liger(operation: Operation) -> Criterion:
    function = import_module("liger_kernel.transformers.functional").liger_cross_entropy
    return partial(function, **operation.options)


def quack(operation: Operation) -> Criterion:
    function = import_module("quack.cross_entropy").cross_entropy
    return partial(function, reduction=operation.reduction, inplace_backward=operation.in_place)


# Liger overwrites logits, and its float16 gradients underflow before they are scaled.
PEERS: dict[str, tuple[str, Callable[[Operation], Criterion], Callable[[Batch], bool]]] = {
    "Liger": ("liger_kernel", liger, lambda b: b.operation.in_place and b.grad_scale is None),
    "quack": ("quack", quack, lambda b: not b.operation.label_smoothing),
}


def eager_bytes(operation: Operation, item: int, classes: int, device: torch.device) -> int:
    """Return the bytes per logit that torch's kernels move. A logit has `item` bytes.

    A CPU's caches hold a row.
    """
    is_reread = device.type == "cuda" and item * classes > SHARED_MEMORY
    # log_softmax reads for the maximum, the sum and the result (once if a cache holds the row), and
    # writes the result.
    forward = 4 if is_reread else 2
    # The loss's gradient is written, zero except for one number per row. log_softmax's backward
    # reads it for its sum and for the result (once if a cache holds the row), reads the output, and
    # writes the result.
    backward = 1 + (4 if is_reread else 3)
    # Label smoothing: the sum of a row, and the addition of two gradients.
    smoothing = 3 if operation.label_smoothing else 0
    return item * (forward + (backward + smoothing if operation.backward else 0))


def providers(
    operation: Operation, shape: tuple[int, ...], dtype: torch.dtype, settings: Settings
) -> list[Provider]:
    batch = Batch(operation, shape, dtype, settings.device)
    item = dtype.itemsize
    passes = 1 + operation.backward  # over memory: the logits, and their gradient

    def provider(
        name: str,
        criterion: Criterion,
        moves: float | None = None,
        agreement: float = Provider.agreement,
    ) -> Provider:
        run = partial(batch.run, criterion)
        return Provider(name, run, batch.restore, moves=moves, agreement=agreement)

    def eager(name: str, cast: bool) -> Provider:
        if not cast and batch.grad_scale is not None:
            return Provider(name, lambda: None, skipped=f"{SCALE:.0f} overflows float16")
        casts = (2 + 4) * passes if cast else 0
        moves = casts + eager_bytes(operation, 4 if cast else item, shape[1], settings.device)
        agreement = ROUGH if not cast and dtype == torch.bfloat16 else Provider.agreement
        return provider(name, torch_criterion(operation, cast), moves, agreement)

    def peer(name: str) -> Provider:
        module, criterion, _ = PEERS[name]
        if not find_spec(module):
            return Provider(name, lambda: None, skipped="not installed")
        return provider(name, criterion(operation), moves=item * (1 + 2 * operation.backward))

    is_short = item < 4
    kept = operation.reduction == "none"
    return [
        *([eager("torch .float()", cast=True)] if is_short else []),
        eager("torch", cast=False),
        provider(
            "torch.compile", torch.compile(torch_criterion(operation, is_short), dynamic=False)
        ),
        *(
            peer(name)
            for name, (_, _, takes_part) in PEERS.items()
            if settings.device.type == "cuda" and takes_part(batch)
        ),
        provider(OURS, ampfuse_criterion(batch), moves=item * (passes + kept)),
    ]


def case(operation: Operation, shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    elements = prod(shape)
    size = elements * dtype.itemsize
    return Case(
        operation=operation.name,
        shape="x".join(map(str, shape)),
        dtype=dtype,
        elements=elements,
        traffic=Traffic(
            read=size,
            written=size if operation.backward else 0,
            against="update" if operation.in_place else "copy" if operation.backward else "read",
        ),
        # Logits, their copy and gradient; for torch, log-probabilities and gradients in float32.
        memory=3 * size + 16 * elements,
        setup=partial(providers, operation, shape, dtype),
        quick=shape in QUICK and operation.name in QUICK_OPERATIONS and dtype == torch.bfloat16,
    )


# Class counts of classifiers, then vocabularies: GPT-2 has 50257 classes, Llama 2 and 3 have 32000
# and 128256, Qwen has 151936.
SMALL: list[tuple[int, ...]] = [(8192, 10), (8192, 100), (8192, 1000)]
POWERS = [(32768, 2**exponent) for exponent in range(8, 17)] + [(16384, 2**17), (8192, 2**18)]
GPU = SMALL + POWERS + [(8192, 50257), (8192, 128256), (4096, 151936)]
# At most 2^25 logits, many times any cache.
CPU = [*SMALL, (1024, 1000), (8192, 256), (8192, 1024), (4096, 4096), (1024, 16384)]
CPU += [(1024, 32000), (512, 50257), (256, 128256), (128, 262144)]
# Segmentation with the number of classes of Pascal VOC and of ADE20K.
IMAGES = [(8, 21, 256, 256), (4, 150, 128, 128)]
QUICK: list[tuple[int, ...]] = [
    (32768, 1024),
    (8192, 50257),
    (8192, 128256),
    (1024, 1000),
    (1024, 32000),
    (512, 50257),
]
QUICK_OPERATIONS = ("train", "train_in_place")

if __name__ == "__main__":
    cases = [
        case(operation, shape, dtype)
        for shape in (GPU if torch.cuda.is_available() else CPU) + IMAGES
        for operation in OPERATIONS
        for dtype in operation.dtypes
        if len(shape) == 2 or not operation.in_place
    ]
    sys.exit(main("cross_entropy", cases))
