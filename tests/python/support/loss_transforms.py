"""Transforms that request derivatives which the losses of ampfuse do not support."""

import torch
from torch.autograd import forward_ad


def dual(loss_of, x):
    with forward_ad.dual_level():
        loss_of(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "grad": lambda loss_of, x: torch.func.grad(loss_of)(x),
    "vjp": lambda loss_of, x: torch.func.vjp(loss_of, x),
    "jvp": lambda loss_of, x: torch.func.jvp(loss_of, (x,), (x,)),
    "jacrev": lambda loss_of, x: torch.func.jacrev(loss_of)(x),
    "jacfwd": lambda loss_of, x: torch.func.jacfwd(loss_of)(x),
    "hessian": lambda loss_of, x: torch.func.hessian(loss_of)(x),
    "vmap of grad": lambda loss_of, x: torch.func.vmap(torch.func.grad(loss_of))(x[None]),
    "grad of vmap": lambda loss_of, x: torch.func.grad(
        lambda x: torch.func.vmap(loss_of)(x[None]).sum()
    )(x),
    "forward mode": dual,
}
