"""Steps of optimizers, with unscaling, overflow check and clipping, for their benchmarks.

torch has no masters. For bfloat16 it is measured by the usual loop around its optimizer, which
casts the gradients to float32, unscales, clips and steps a float32 copy, and casts that back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import shapes
import torch
from bench_multi_tensor import filled
from harness import OURS, Case, Provider, Settings, Traffic
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

SCALE = 2.0**16  # torch's initial loss scale
LIMIT = 1.0
CASTS = 12  # bytes per parameter of the casts around a float32 copy
PASSES = 20  # of torch's unscaling (8), norm (4) and clipping (8)

Make = Callable[..., Any]  # makes an optimizer from parameters and options


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
    """unscale_, clip_grad_norm_ and a step of float32 parameters, or the update alone.

    Only fused implementations skip; the others would have to wait for the flag.
    """

    def __init__(self, model: Model, whole: bool, make: Make) -> None:
        self.model, self.whole = model, whole
        self.parameters = model.parameters
        self.optimizer: Optimizer = make(self.parameters)

    def __call__(self) -> None:
        """Take one step."""
        if self.whole:
            grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            found_inf = torch.zeros((), device=self.model.scale.device)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, self.model.inv_scale)
            clip_grad_norm_(self.parameters, LIMIT)
            if self.optimizer.defaults["fused"]:
                self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        self.optimizer.step()


class TorchMasters(TorchStep):
    """The loop that people write to train a bfloat16 model with float32 masters."""

    def __init__(self, model: Model, whole: bool, make: Make) -> None:
        masters = Model([], model.parameters[0].dtype, model.scale.device)
        masters.parameters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters]
        super().__init__(masters, whole, make)
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

    def __init__(self, model: Model, whole: bool, make: Make) -> None:
        self.optimizer = make(model.parameters, max_grad_norm=LIMIT if whole else None)
        if whole:
            self.optimizer.grad_scale = model.scale

    def __call__(self) -> None:
        """Take one step."""
        self.optimizer.step()


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


class Steps:
    """Makes the providers of an operation. Their models begin alike, with the same gradients."""

    def __init__(
        self, operation: Operation, shape_list: list[shapes.Shape], settings: Settings
    ) -> None:
        self._operation, self._shapes, self._device = operation, shape_list, settings.device
        self._kept = self._model().parameters
        self._grads = [parameter.detach().clone() for parameter in self._kept]
        self._theirs = TorchStep if operation.dtype == torch.float32 else TorchMasters

    def _model(self) -> Model:
        torch.manual_seed(0)
        return Model(self._shapes, self._operation.dtype, self._device)

    @torch.no_grad()
    def _restore(self) -> None:
        if self._operation.whole and self._operation.dtype == torch.float32:
            torch._foreach_copy_(self._grads, self._kept)  # torch writes them in place

    def provider(
        self, name: str, make: Callable[[Model], Callable[[], None]], moves: float | None = None
    ) -> Provider:
        """Return a provider whose step `make` returns for a model."""
        model = self._model().take(self._grads)
        slack = 2**-8 if "8bit" in self._operation.ours.values() else 0.0  # moments are rounded
        return Provider(
            name, make(model), self._restore, model.parameters, moves=moves, slack=slack
        )

    def torch_step(self, model: Model, make: Make) -> TorchStep:
        """Return a step of one of torch's optimizers."""
        return self._theirs(model, self._operation.whole, make)

    def of_torch(self, name: str, make: Make, update: int | None = None) -> Provider:
        """Return the provider of one of torch's optimizers, whose update moves these bytes."""
        moves = None
        if update is not None:
            casts = CASTS if self._theirs is TorchMasters else 0
            moves = casts + (PASSES if self._operation.whole else 0) + update
        return self.provider(name, partial(self.torch_step, make=make), moves)

    def ours(self, make: Make) -> Provider:
        """Return the provider of one of ampfuse's optimizers."""
        of_operation = partial(make, **self._operation.ours)
        step = partial(AmpfuseStep, whole=self._operation.whole, make=of_operation)
        return self.provider(OURS, step, self._operation.floor)


def step_case(
    operation: Operation,
    shape: str,
    shape_list: list[shapes.Shape],
    providers: Callable[[Operation, list[shapes.Shape], Settings], list[Provider]],
    *,
    moments: int,
    is_quick: bool,
) -> Case:
    """Return the case of an operation with parameters of these shapes."""
    elements = shapes.element_count(shape_list)
    of_provider = operation.dtype.itemsize + 4 + 4 * moments  # parameter, master and moments
    return Case(
        operation=operation.name,
        shape=shape,
        dtype=operation.dtype,
        elements=elements,
        traffic=Traffic(operation.read * elements, operation.written * elements, "update"),
        # Four providers; gradients, their copy, temporaries.
        memory=elements * (4 * of_provider + 16),
        setup=partial(providers, operation, shape_list),
        quick=is_quick,
    )
