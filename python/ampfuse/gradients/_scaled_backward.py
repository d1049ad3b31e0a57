"""Notes which gradients the backward passes of scaled losses have computed since the last update.

By these notes a scaler notices gradients that were used while they were scaled, and scaled losses
whose backward pass was not run. They are taken in its first steps alone.
"""

from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from ampfuse.gradients.signals import Version


class Computed(NamedTuple):
    """A gradient at the end of the backward pass that has computed it."""

    param: Tensor
    writes: int  # to the parameter until then
    grad: Version


class ScaledBackward:
    """The backward passes of scaled losses."""

    def __init__(self) -> None:
        self._losses = 0
        self._has_run = False
        self._computed: dict[int, Computed] = {}  # by the ids of parameters

    def watch(self, loss: Tensor, product: Tensor) -> None:
        """Note what a backward pass of `product`, the scaled loss, will compute."""
        self._losses += 1
        # Other leaves are inputs, which adversarial training writes by the signs of gradients.
        params: list[Tensor] = [leaf for leaf in leaves_of(loss) if isinstance(leaf, Parameter)]

        def note_start(_: Tensor) -> None:
            self._has_run = True
            Variable._execution_engine.queue_callback(lambda: self._note_end(params))

        product.register_hook(note_start)  # type: ignore[no-untyped-call]

    def _note_end(self, params: list[Tensor]) -> None:
        for param in params:
            grad = param.grad
            if grad is not None and not (grad.is_inference() or param.is_inference()):
                self._computed[id(param)] = Computed(param, param._version, Version.read(grad))

    def has_computed(self, param: Tensor) -> bool:
        """Return True if a backward pass has computed this gradient since `forget`."""
        return id(param) in self._computed

    def forget(self, param: Tensor) -> None:
        """Forget a gradient, since it is unscaled now."""
        self._computed.pop(id(param), None)

    def is_unused(self) -> bool:
        """Return True if losses were scaled, and no backward pass came from any of them."""
        return self._losses > 0 and not self._has_run

    def was_stepped_by_others(self, own: set[int]) -> bool:
        """Return True if other code has written parameters by their gradients, which are scaled.

        `own`: the ids of the parameters that the scaler steps.
        """
        return any(
            id(param) not in own
            and param._version > writes
            and param.grad is grad.grad()
            and grad.unwritten() is not None
            for param, writes, grad in self._computed.values()
        )

    def end_step(self) -> None:
        """Forget all: the scaler is updated."""
        self._losses, self._has_run = 0, False
        self._computed.clear()


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
