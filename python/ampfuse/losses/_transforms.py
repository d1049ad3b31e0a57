"""The losses' error under torch.func and in forward mode, which they do not support."""

import re

# Torch's messages: for C++ autograd functions under torch.func, for operators in forward mode, and
# for C++ autograd functions in forward mode.
_REFUSALS = re.compile(r"with functorch transforms|forward AD|jvp is not implemented")


def refusal(function: str) -> NotImplementedError:
    return NotImplementedError(
        f"{function}: torch.func transforms (grad, vjp, jvp, jacrev, hessian) and forward-mode AD "
        "are not supported; use torch.nn.functional.cross_entropy of the logits under them"
    )


def raise_if_refused(function: str, error: RuntimeError) -> None:
    """Raise `refusal(function)` if the error is torch's own refusal.

    Active transforms are not checked beforehand: torch refuses only what is differentiated (a
    metric of detached logits works inside `torch.func.grad`), and the check would cost time in each
    call and break the graph of `torch.compile` under vmap.
    """
    if _REFUSALS.search(str(error)):
        raise refusal(function) from error
