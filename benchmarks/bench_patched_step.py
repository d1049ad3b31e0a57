"""How much faster patching makes a program that only uses torch, measured after backward().

    python benchmarks/bench_patched_step.py [--quick] [--device cuda] [--cases '*/1000*']

An iteration is `unscale_`, `clip_grad_norm_`, AdamW's `step` and `update`, by torch's names. With
small tensors the host takes most of the time. The program runs unchanged ("torch"), with torch's
fused optimizer ("torch fused=True"), and patched. The fewest bytes per float32 element are 8 to
unscale in place and 8 to clip in place, as the program requests, and 28 for Adam.
"""

import sys
from functools import partial

import ampfuse
import shapes
import torch
from bench_multi_tensor import filled
from harness import OURS, Case, Provider, Settings, Traffic, main

LISTS: dict[str, list[shapes.Shape]] = {
    "100x1K": [(shapes.K,)] * 100,
    "1000x1K": [(shapes.K,)] * 1000,
    "resnet50": shapes.resnet50(),
}
QUICK = ("100x1K", "1000x1K")
LIMIT = 1.0  # lower than the gradients' norm in every case


class Program:
    """A program whose parameters have gradients. It is patched if torch is when it is created."""

    def __init__(self, start: list[torch.Tensor], fused: bool | None = None):
        self.start = start
        self.parameters: list[torch.Tensor] = [
            torch.nn.Parameter(tensor.clone()) for tensor in start
        ]
        for parameter, tensor in zip(self.parameters, start, strict=True):
            parameter.grad = tensor.clone()
        self.gradients = [
            parameter.grad for parameter in self.parameters if parameter.grad is not None
        ]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, fused=fused)
        self.scaler = torch.amp.GradScaler(start[0].device.type, 4.0)  # type: ignore[attr-defined]
        self.scaler.scale(torch.ones_like(start[0]))
        self.clip = torch.nn.utils.clip_grad_norm_

    def __call__(self) -> None:
        """Run one iteration."""
        self.scaler.unscale_(self.optimizer)
        self.clip(self.parameters, LIMIT)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @torch.no_grad()
    def restore(self) -> None:
        """Restore parameters, gradients and the optimizer's state."""
        torch._foreach_copy_(self.parameters, self.start)
        torch._foreach_copy_(self.gradients, self.start)
        for state in self.optimizer.state.values():
            torch._foreach_zero_([*state.values()])


def providers(shape_list: list[shapes.Shape], settings: Settings) -> list[Provider]:
    noise = torch.randn(shapes.M, device=settings.device)
    start = [filled(shape, noise) for shape in shape_list]

    def provider(name: str, fused: bool | None = None) -> Provider:
        program = Program(start, fused)
        return Provider(name, program, program.restore, program.parameters)

    ampfuse.unpatch()  # undo the patch of the previous case
    torchs = [provider("torch"), provider("torch fused=True", fused=True)]
    ampfuse.patch()
    return [*torchs, provider(OURS)]


def case(shape: str) -> Case:
    elements = shapes.element_count(LISTS[shape])
    return Case(
        operation="patched_step",
        shape=shape,
        dtype=torch.float32,
        elements=elements,
        traffic=Traffic(read=24 * elements, written=20 * elements, against="update"),
        memory=(4 + 3 * 16) * elements,
        setup=partial(providers, LISTS[shape]),
        quick=shape in QUICK,
    )


if __name__ == "__main__":
    sys.exit(main("patched_step", [case(shape) for shape in LISTS]))
