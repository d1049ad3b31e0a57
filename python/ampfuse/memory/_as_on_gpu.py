"""Runs a program that is meant for a GPU with tensors on a CPU.

Autocast then converts the same arguments as on a GPU. On a CPU it converts fewer of them to
float32, for example not those of layer_norm, so activations would have other sizes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# The functions that torch's documentation lists for CUDA under "ops that autocast to float32".
LISTED = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits cdist
    cosh cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist erfinv exp
    expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2
    log_softmax margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss
    norm normalize pdist poisson_nll_loss pow prod reciprocal renorm rsqrt sinh smooth_l1_loss
    soft_margin_loss softmax softmin softplus sum tan triplet_margin_loss
"""
IN_FLOAT32 = frozenset(LISTED.split())
NARROW = (torch.float16, torch.bfloat16)


class AsOnGpu(TorchFunctionMode):
    """Puts tensors on the CPU in place of a GPU, and converts arguments as autocast on a GPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "cuda" and isinstance(args[0], Tensor):  # Tensor.cuda()
            return args[0]
        if name in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_in_float32, (args, kwargs))
        if name == "scaled_dot_product_attention":
            # With dropout, a CPU would keep a number for each pair of words. A GPU does not.
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        args, kwargs = tree_map(_on_cpu, (args, kwargs))
        return function(*args, **kwargs)


def _in_float32(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in NARROW
    return value.float() if is_narrow else value


def _on_cpu(value: Any) -> Any:
    is_gpu = isinstance(value, (str, torch.device)) and str(value).partition(":")[0] == "cuda"
    return "cpu" if is_gpu else value


@contextmanager
def autocast_on_cpu() -> Iterator[None]:
    """Make `torch.autocast("cuda")` work on a CPU. Without a GPU, torch would disable it."""
    init: Callable[..., None] = torch.autocast.__init__

    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.get_autocast_dtype("cuda")
            device_type = "cpu"
        init(self, device_type, *args, **kwargs)

    torch.autocast.__init__ = on_cpu  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = init  # type: ignore[method-assign]
