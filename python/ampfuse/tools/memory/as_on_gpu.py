"""Runs a program that is meant for a GPU with tensors on a CPU.

Autocast then converts the same arguments as on a GPU. On a CPU it converts fewer of them to
float32, for example not those of layer_norm, so activations would have other sizes. Dropout and
attention keep what they keep on a GPU, and torch's optimizers choose the same implementation.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ampfuse._dtypes import DTYPES_16_BIT
from ampfuse.tools.hooks import replace

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

# Functions of torch.cuda that do nothing here. Those that return bytes return 0 without a GPU.
NOTHING = (
    *("empty_cache", "ipc_collect", "reset_max_memory_allocated", "reset_peak_memory_stats"),
    *("set_device", "synchronize"),
)


class AsOnGpu(TorchFunctionMode):
    """Puts tensors on the CPU in place of a GPU, and converts arguments as autocast on a GPU.

    `sent(tensor)` returns what a tensor is on the device to which the program moves it.
    """

    def __init__(self, sent: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._sent = sent

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch."""
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("cuda", "pin_memory") and isinstance(args[0], Tensor):
            return self._sent(args[0]) if name == "cuda" else args[0]
        if name in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = convert_to_float32((args, kwargs))
        if name == "to" and len(args) > 1 and type(args[1]) is int:  # the number of a GPU
            args = (args[0], "cpu", *args[2:])
        is_move = name == "to" and any(map(_is_device, (*args[1:], *kwargs.values())))
        args, kwargs = tree_map(_move_to_cpu, (args, kwargs))
        result = function(*args, **kwargs)
        return self._sent(result) if is_move else result


def convert_to_float32(values: Any) -> Any:
    """Return nested values with all 16-bit tensors in float32."""
    return tree_map(
        lambda x: x.float() if isinstance(x, Tensor) and x.dtype in DTYPES_16_BIT else x, values
    )


def _is_device(value: Any) -> bool:
    return isinstance(value, (str, torch.device))


def _move_to_cpu(value: Any) -> Any:
    is_gpu = _is_device(value) and str(value).partition(":")[0] == "cuda"
    return "cpu" if is_gpu else value


@contextmanager
def act_as_on_gpu(sent: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Run the code in this block as if its tensors on the CPU were on a GPU."""
    with ExitStack() as exits:
        for name in NOTHING:
            replace(exits, torch.cuda, name, lambda *_, **__: None)
        replace(exits, torch.cuda, "get_device_name", lambda *_: "GPU")
        replace(exits, torch.autocast, "__init__", _autocast_on_cpu(torch.autocast.__init__))
        replace(exits, functional, "dropout", _dropout(functional.dropout))
        attention = functional.scaled_dot_product_attention
        replace(exits, functional, "scaled_dot_product_attention", remove_dropout(attention))
        # torch's optimizers take lists of tensors by default only on devices that this returns.
        lists = "_get_foreach_kernels_supported_devices"
        replace(exits, torch_optimizer, lists, lambda: ["cuda", "cpu"])
        mode = AsOnGpu(sent)
        run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        replace(exits, torch.autograd, "_engine_run_backward", _within(mode, run))
        exits.enter_context(mode)
        yield


def _within(mode: AsOnGpu, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a backward pass in which the mode is active: checkpoints call functions again.

    The mode is not active in what it calls itself, such as `Tensor.backward`.
    """

    def run_within(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return run(*args, **kwargs)

    return run_within


def _autocast_on_cpu(init: Callable[..., None]) -> Callable[..., None]:
    """Make `torch.autocast("cuda")` work on a CPU. Without a GPU, torch would disable it."""

    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda":
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = torch.get_autocast_dtype("cuda")
            device_type = "cpu"
        init(self, device_type, *args, **kwargs)

    return on_cpu


def _dropout(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make dropout keep a mask of bools, as on a GPU. A CPU keeps one of floats."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if inplace or not training or not 0 < p < 1:
            return function(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    return dropout


def remove_dropout(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch's attention without its dropout.

    With dropout a CPU, unlike a GPU, keeps a number for each pair of words.
    """

    @wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        else:
            kwargs["dropout_p"] = 0.0
        return function(*args, **kwargs)

    return attention
