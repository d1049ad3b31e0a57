"""One clear error where torch.func or forward mode asks a loss for a derivative that it lacks."""

import re

# What torch raises: for autograd functions in C++ under torch.func, for operators in forward mode,
# and for autograd functions in C++ in forward mode.
_REFUSALS = re.compile(r"with functorch transforms|forward AD|jvp is not implemented")


def refusal(function: str) -> NotImplementedError:
    return NotImplementedError(
        f"{function}: torch.func transforms (grad, vjp, jvp, jacrev, hessian) and forward-mode AD "
        "are not supported; use torch.nn.functional.cross_entropy of the logits under them"
    )


def raise_if_refused(function: str, error: RuntimeError) -> None:
    """Raise `refusal(function)` if the error is torch's own refusal.

    Torch is left to find out, since it refuses only what is differentiated (a metric of detached
    logits works inside of `torch.func.grad`), and since to ask for the transforms that are active
    would cost each call something and break the graph of `torch.compile` under vmap.
    """
    if _REFUSALS.search(str(error)):
        raise refusal(function) from error
