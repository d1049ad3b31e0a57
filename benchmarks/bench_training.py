"""Whole training steps of GPT-2 and ViT: forward, loss, backward, clipping, AdamW.

    python benchmarks/bench_training.py [--quick] [--device cuda] [--cases 'step/gpt2*/bfloat16']

Where there is a GPU the models are GPT-2 124M, on 8 sequences of 1024 words, and ViT-B/16, on 64
images; elsewhere they are small. The dtype is that of autocast; parameters are float32. float16
steps have a GradScaler.

- torch                   the loop of torch's tutorials
- torch fused=True        the same with torch's fused AdamW
- torch.compile           the same, with model and loss compiled
- ampfuse                 AdamW that unscales and clips; linear_cross_entropy for GPT-2,
                          cross_entropy for ViT
- ampfuse, torch.compile  the same, with the model compiled

The floor is the products of the model: 6 multiplications and additions for each of its weights and
each word or patch, and those of attention. Memory is all that a program holds at the peak:
parameters, gradients, optimizer state, activations, and the logits.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ampfuse
import torch
from harness import OURS, Case, Products, Provider, Settings, main
from models import GPT2, Size, ViT
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

LIMIT = 1.0  # norm to which gradients are clipped
# Takes hidden states, weight, targets, and the gradient that its backward will receive if known.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Model:
    """A kind of model in one size, and the size of its batches."""

    name: str
    kind: type[GPT2] | type[ViT]
    size: Size

    @property
    def tokens(self) -> int:
        """The number of words or patches in a batch."""
        size = self.size
        per_item = size.length if self.kind is GPT2 else (size.length // 16) ** 2 + 1
        return size.batch * per_item

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs and targets."""
        size = self.size
        if self.kind is GPT2:
            words = torch.randint(size.classes, (size.batch, size.length + 1), device=device)
            return words[:, :-1], words[:, 1:].flatten()
        images = torch.randn(size.batch, 3, size.length, size.length, device=device)
        return images, torch.randint(size.classes, (size.batch,), device=device)

    @property
    def products(self) -> int:
        """The multiplications and additions of a step."""
        size = self.size
        per_item = self.tokens // size.batch
        rows = self.tokens if self.kind is GPT2 else size.batch  # of the last layer
        block = 12 * size.width**2 * self.tokens
        pairs = 2 * self.tokens * per_item * size.width // (2 if self.kind is GPT2 else 1)
        # No gradient of the images is computed: two of the three products.
        patches = 0 if self.kind is GPT2 else 2 * 16**2 * size.width * (self.tokens - size.batch)
        last = size.classes * size.width * rows
        return 6 * (size.depth * (block + pairs) + patches + last)


class Program:
    """One training program. Each call takes a step and returns the loss."""

    def __init__(
        self, model: Model, dtype: torch.dtype, device: torch.device, loss: Loss, compiled: bool
    ) -> None:
        torch.manual_seed(0)
        self.model = model.kind(model.size).to(device)
        self.inputs, self.targets = model.batch(device)
        self.autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        self.enabled = dtype == torch.float16
        self.device = device
        self.hidden = torch.compile(self.model) if compiled else self.model
        self.loss = loss
        self.params = [*self.model.parameters()]
        self.optimizer, self.scaler = self.make_optimizer()

    def make_optimizer(self) -> tuple[torch.optim.Optimizer, GradScaler]:
        """Return the optimizer and the scaler."""
        raise NotImplementedError

    def update(self) -> None:
        """Clip, step and update the scale."""
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def grad_scale(self) -> Tensor | None:
        """Return the gradient that the loss's backward will receive, or None."""
        return None

    def __call__(self) -> Tensor:
        """Take a step."""
        self.optimizer.zero_grad()
        with self.autocast:
            hidden = self.hidden(self.inputs)
            loss = self.loss(hidden, self.model.weight, self.targets, self.grad_scale())
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.update()
        return loss.detach()

    def held(self) -> int:
        """Return the bytes of parameters, gradients and optimizer state."""
        states = [t for state in self.optimizer.state.values() for t in state.values()]
        tensors = [*self.params, *(p.grad for p in self.params), *states]
        return sum(t.nbytes for t in tensors if isinstance(t, Tensor))


class Torchs(Program):
    """The loop of torch's tutorials."""

    fused: bool | None = None

    def make_optimizer(self) -> tuple[torch.optim.Optimizer, GradScaler]:
        """Return torch's optimizer and scaler."""
        optimizer = torch.optim.AdamW(self.params, fused=self.fused)
        return optimizer, GradScaler(self.device.type, enabled=self.enabled)

    def update(self) -> None:
        """Unscale, clip, step and update the scale."""
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.params, LIMIT)
        super().update()


class TorchsFused(Torchs):
    """The same with torch's fused AdamW."""

    fused = True


class Ours(Program):
    """The same loop with ampfuse's optimizer and scaler."""

    def make_optimizer(self) -> tuple[torch.optim.Optimizer, GradScaler]:
        """Return ampfuse's optimizer, which also clips, and scaler."""
        optimizer = ampfuse.AdamW(self.params, max_grad_norm=LIMIT)
        return optimizer, ampfuse.GradScaler(self.device.type, enabled=self.enabled)

    def grad_scale(self) -> Tensor | None:
        """Return the scale if there is one."""
        assert isinstance(self.scaler, ampfuse.GradScaler)
        return self.scaler.scale_tensor() if self.enabled else None


def torchs_loss(hidden: Tensor, weight: Tensor, target: Tensor, _: Tensor | None) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), target)


def our_linear_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, grad_scale: Tensor | None
) -> Tensor:
    return ampfuse.linear_cross_entropy(hidden, weight, target, grad_scale=grad_scale)


def our_loss(hidden: Tensor, weight: Tensor, target: Tensor, grad_scale: Tensor | None) -> Tensor:
    return ampfuse.cross_entropy(functional.linear(hidden, weight), target, grad_scale=grad_scale)


def providers(model: Model, dtype: torch.dtype, settings: Settings) -> list[Provider]:
    def provider(name: str, kind: type[Program], loss: Loss, compiled: bool = False) -> Provider:
        program = kind(model, dtype, settings.device, loss, compiled)
        return Provider(name, program, held=program.held)

    compiled_loss = torch.compile(torchs_loss)
    ours = our_linear_loss if model.kind is GPT2 else our_loss
    return [
        provider("torch", Torchs, torchs_loss),
        provider("torch fused=True", TorchsFused, torchs_loss),
        provider("torch.compile", TorchsFused, compiled_loss, compiled=True),
        provider(OURS, Ours, ours),
        provider(f"{OURS}, torch.compile", Ours, ours, compiled=True),
    ]


def case(model: Model, dtype: torch.dtype) -> Case:
    parameters = 12 * model.size.depth * model.size.width**2 + model.size.classes * model.size.width
    # Each program has parameters, gradients and moments; one has activations and logits at a time.
    activations = 80 * model.size.depth * model.tokens * model.size.width
    logits = 16 * model.tokens * model.size.classes if model.kind is GPT2 else 0
    return Case(
        operation="step",
        shape=model.name,
        dtype=dtype,
        elements=model.tokens,
        traffic=Products(model.products, dtype),
        memory=5 * 16 * parameters + activations + logits,
        setup=partial(providers, model, dtype),
        quick=dtype == torch.bfloat16,
        weighs_memory=True,
    )


GPU = [
    Model("gpt2-124m", GPT2, Size(768, 12, 12, 50257, length=1024, batch=8)),
    Model("vit-b-16", ViT, Size(768, 12, 12, 1000, length=224, batch=64)),
]
CPU = [
    Model("gpt2-small", GPT2, Size(128, 2, 4, 50257, length=64, batch=8)),
    Model("vit-small", ViT, Size(192, 4, 3, 1000, length=224, batch=8)),
]
DTYPES = [torch.float32, torch.bfloat16]

if __name__ == "__main__":
    on_gpu = torch.cuda.is_available()
    dtypes = [*DTYPES, torch.float16] if on_gpu else DTYPES  # CPUs multiply float16 very slowly
    cases = [case(model, dtype) for model in (GPU if on_gpu else CPU) for dtype in dtypes]
    sys.exit(main("training", cases))
