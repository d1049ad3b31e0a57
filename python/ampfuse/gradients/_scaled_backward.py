"""Notes which gradients the backward passes of scaled losses have computed since the last update.

By these notes a scaler notices gradients that were used while they were scaled, and scaled losses
whose backward pass was not run. They are taken in its first steps alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from ampfuse.gradients.version import Version


class ScaledBackward:
    """The backward passes of scaled losses."""

    def __init__(self) -> None:
        self._losses = 0
        self._has_run = False
        self._computed: dict[int, Version] = {}  # by the ids of parameters

    def watch(self, loss: Tensor, product: Tensor) -> None:
        """Note what a backward pass of `product`, the scaled loss, will compute."""
        self._losses += 1
        # Other leaves are inputs, which adversarial training writes by the signs of gradients.
        params: list[Tensor] = [leaf for leaf in leaves_of(loss) if isinstance(leaf, Parameter)]

        def note_start(_: Any) -> None:
            self._has_run = True
            if torch.compiler.is_compiling():  # the compiler cannot trace what follows
                return
            before = [version_of(param.grad) for param in params]
            Variable._execution_engine.queue_callback(lambda: self._note_end(params, before))

        assert product.grad_fn is not None
        product.grad_fn.register_prehook(note_start)

    def _note_end(self, params: list[Tensor], before: list[Version | None]) -> None:
        for param, version in zip(params, before, strict=True):
            now = version_of(param.grad)
            if now is not None and now != version:  # backward(inputs=...) leaves others as they are
                self._computed[id(param)] = now

    def note_other(self) -> None:
        """Note that something else than one loss was scaled, which is not watched."""
        self._has_run = True

    def has_computed(self, param: Tensor) -> bool:
        """Return True if a backward pass has computed this gradient since `forget`."""
        version = self._computed.get(id(param))
        return version is not None and version.grad() is param.grad

    def is_scaled(self, param: Tensor) -> bool:
        """Return True if the gradient is still as a backward pass of a scaled loss has left it."""
        return self.has_computed(param) and self._computed[id(param)].unwritten() is not None

    def note_inspection(self, param: Tensor) -> None:
        """Note that a scaler has checked this gradient, which counts as a write: it is scaled."""
        version = version_of(param.grad)
        if version is not None:
            self._computed[id(param)] = version

    def forget(self, param: Tensor) -> None:
        """Forget a gradient, since it is unscaled now."""
        self._computed.pop(id(param), None)

    def is_unused(self) -> bool:
        """Return True if losses were scaled, and no backward pass came from any of them."""
        return self._losses > 0 and not self._has_run

    def end_step(self) -> None:
        """Forget all: the scaler is updated."""
        self._losses, self._has_run = 0, False
        self._computed.clear()


def version_of(grad: Tensor | None) -> Version | None:
    """Return the version of a gradient, or None without one, and in inference mode."""
    return None if grad is None or grad.is_inference() else Version.read(grad)


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Return the tensors whose gradients a backward pass of the loss computes."""
    nodes: list[Any] = [loss.grad_fn]
    seen, leaves = {None}, []
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            nodes += [following for following, _ in node.next_functions]
    return leaves
