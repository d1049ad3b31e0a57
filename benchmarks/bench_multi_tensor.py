"""Gradient norm, clip and unscale over lists of tensors.

    python benchmarks/bench_multi_tensor.py [--quick] [--device cuda] [--cases '*clip*/gpt2*']

The floor is the fewest passes over the list (reads, writes):

- total_norm                1, 0   every element read once
- clip                      2, 1   the norm must be known before the first element is scaled
- clip_below_limit          1, 0   the factor is 1: nothing needs to be written
- unscale                   1, 1
- unscale_norm_clip         2, 1   read for the norm and the overflow flag, then one product with
                                   inv_scale * factor; foreach and ampfuse write the unscaled values
                                   in between, and so move more than this floor
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import ampfuse
import shapes
import torch
from harness import OURS, Case, Provider, Settings, Traffic, main
from torch.nn.utils import clip_grad_norm_, get_total_norm

# The longest lists that are compiled. The compiler unrolls a list into its program, so the compile
# time grows with the number of tensors, to more than minutes for the longest lists here.
COMPILED_TENSORS, COMPILED_TENSORS_QUICK = 256, 64
INV_SCALE = 2.0**-16  # the inverse of torch's initial loss scale
NO_LIMIT = 1e9
QUICK = [(shape, torch.float32) for shape in ("64x1M", "10000x64", "resnet50")]


class Gradients:
    """Random gradients of the given shapes, the parameters that hold them, and a scaler's tensors.

    No operation here reads the parameters' own values, so these serve as the copy from which
    `restore` restores the gradients.
    """

    def __init__(self, shape_list: list[shapes.Shape], dtype: torch.dtype, device: torch.device):
        noise = torch.randn(shapes.M, device=device).to(dtype)
        self.tensors = [filled(shape, noise) for shape in shape_list]
        self.parameters = [gradient.clone().requires_grad_() for gradient in self.tensors]
        for parameter, gradient in zip(self.parameters, self.tensors, strict=True):
            parameter.grad = gradient
        self.found_inf = torch.zeros((), device=device)
        self.inv_scale = torch.tensor(INV_SCALE, device=device)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the gradients that an operation has overwritten."""
        torch._foreach_copy_(self.tensors, self.parameters)


def filled(shape: shapes.Shape, noise: torch.Tensor) -> torch.Tensor:
    """Return a tensor filled with copies of `noise`: to draw every number costs far more."""
    tensor = noise.new_empty(shape)
    flat = tensor.view(-1)
    for start in range(0, flat.numel(), noise.numel()):
        piece = flat[start : start + noise.numel()]
        piece.copy_(noise[: piece.numel()])
    return tensor


def foreach_unscale(g: Gradients) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(g.tensors, g.found_inf, g.inv_scale)


def plain_unscale(g: Gradients) -> None:
    """Do what foreach_unscale does, in ops that the compiler can fuse; ATen's is opaque to it."""
    bad = [(~torch.isfinite(gradient)).any() for gradient in g.tensors]
    g.found_inf.copy_(torch.stack(bad).any())
    torch._foreach_mul_(g.tensors, g.inv_scale)


def ampfuse_unscale(g: Gradients) -> None:
    torch.ops.ampfuse.multi_tensor_unscale(g.tensors, g.found_inf, g.inv_scale)


def foreach_clip(g: Gradients, limit: float) -> torch.Tensor:
    norm: torch.Tensor = clip_grad_norm_(g.parameters, limit)
    return norm


def ampfuse_clip(g: Gradients, limit: float) -> torch.Tensor:
    norm: torch.Tensor = ampfuse.clip_grad_norm_(g.parameters, limit)
    return norm


def foreach_chain(g: Gradients, limit: float) -> torch.Tensor:
    foreach_unscale(g)
    return foreach_clip(g, limit)


def plain_chain(g: Gradients, limit: float) -> torch.Tensor:
    plain_unscale(g)
    return foreach_clip(g, limit)


def ampfuse_chain(g: Gradients, limit: float) -> torch.Tensor:
    norm: torch.Tensor
    norm, *_ = torch.ops.ampfuse.multi_tensor_unscale_norm(g.tensors, g.found_inf, g.inv_scale)
    torch.ops.ampfuse.multi_tensor_clip(g.tensors, norm, limit)
    return norm


@dataclass(frozen=True)
class Operation:
    """One operation by three providers, and the passes over memory of its floor."""

    name: str
    reads: int
    writes: int
    foreach: Callable[[Gradients], object]
    compiled: Callable[[Gradients], object]
    ours: Callable[[Gradients], object]
    mutates: bool = True


def clipping(name: str, reads: int, writes: int, limit: float) -> Operation:
    foreach = partial(foreach_clip, limit=limit)
    return Operation(name, reads, writes, foreach, foreach, partial(ampfuse_clip, limit=limit))


# The smallest list is 1x1K of bench_grad_scaler: a norm of 32, which is 0.0005 after unscaling.
LIMIT, UNSCALED_LIMIT = 1.0, 1e-4

OPERATIONS = [
    Operation(
        "total_norm",
        reads=1,
        writes=0,
        foreach=lambda g: get_total_norm(g.tensors),
        compiled=lambda g: get_total_norm(g.tensors),
        ours=lambda g: ampfuse.get_total_norm(g.tensors),
        mutates=False,
    ),
    clipping("clip", reads=2, writes=1, limit=LIMIT),
    clipping("clip_below_limit", reads=1, writes=0, limit=NO_LIMIT),
    Operation("unscale", 1, 1, foreach_unscale, plain_unscale, ampfuse_unscale),
    Operation(
        "unscale_norm_clip",
        reads=2,
        writes=1,
        foreach=partial(foreach_chain, limit=UNSCALED_LIMIT),
        compiled=partial(plain_chain, limit=UNSCALED_LIMIT),
        ours=partial(ampfuse_chain, limit=UNSCALED_LIMIT),
    ),
]


def providers(
    operation: Operation,
    shape_list: list[shapes.Shape],
    dtype: torch.dtype,
    settings: Settings,
) -> list[Provider]:
    gradients = Gradients(shape_list, dtype, settings.device)
    limit = COMPILED_TENSORS_QUICK if settings.quick else COMPILED_TENSORS
    too_many = f"{len(shape_list)} tensors to unroll; compiled up to {limit}"
    compiled = torch.compile(operation.compiled, dynamic=False, fullgraph=True)

    def provider(name: str, run: Callable[[Gradients], object], skipped: str = "") -> Provider:
        restore = gradients.restore if operation.mutates else lambda: None
        mutates = gradients.tensors if operation.mutates else ()
        return Provider(name, lambda: run(gradients), restore, mutates, skipped)

    return [
        provider("torch foreach", operation.foreach),
        provider("torch.compile", compiled, too_many if len(shape_list) > limit else ""),
        provider(OURS, operation.ours),
    ]


def case(operation: Operation, shape: str, dtype: torch.dtype) -> Case:
    shape_list = (shapes.REGULAR | shapes.MODELS)[shape]()
    elements = shapes.element_count(shape_list)
    list_bytes = elements * dtype.itemsize
    return Case(
        operation=operation.name,
        shape=shape,
        dtype=dtype,
        elements=elements,
        traffic=Traffic(
            read=operation.reads * list_bytes,
            written=operation.writes * list_bytes,
            against="update" if operation.writes else "read",
        ),
        # Gradients and their copy; the compiler may keep one more list as a temporary.
        memory=3 * list_bytes,
        setup=partial(providers, operation, shape_list, dtype),
        quick=(shape, dtype) in QUICK,
    )


# A 16-bit model has 16-bit gradients; the two smaller models are the usual float32 ones.
INPUTS = [(shape, dtype) for shape in shapes.REGULAR for dtype in (torch.float32, torch.bfloat16)]
INPUTS += [("resnet50", torch.float32), ("gpt2-124m", torch.float32), ("llama-1b", torch.bfloat16)]

if __name__ == "__main__":
    cases = [case(operation, *chosen) for chosen in INPUTS for operation in OPERATIONS]
    sys.exit(main("multi_tensor", cases))
