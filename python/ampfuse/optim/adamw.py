"""AdamW: `Adam` with decoupled weight decay, like `torch.optim.AdamW`."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse._arguments import refuse_unknown
from ampfuse.optim.adam import Adam
from ampfuse.optim.options import REMEDIES as ADAM_REMEDIES

REMEDIES = ADAM_REMEDIES | {"decoupled_weight_decay": "it is always True in AdamW; use Adam"}


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` with master weights, clipping and unscaling inside the step.

    A step unscales and clips gradients as it reads them, and updates parameters, masters and
    moments in place, in one pass. Weights decay by the factor `1 - lr * weight_decay`,
    independently of the gradient. If the step clips or checks for overflow, it first reads the
    gradients once more. After an overflow it is skipped on the device, so the host does not wait
    for a GPU.

    For float32 parameters, results equal those of torch's fused implementation or are closer to the
    exact ones. Parameters may be float16, bfloat16 and float32 in any mixture, and so may their
    gradients, independently. float64 and complex parameters are stepped as in torch.

    The arguments from `master_weights` on are ampfuse's own. Those up to `write_back_grads` may
    also be options of a group. State dicts hold those of a group, but not the constructor's.

    Loss scaling: a step uses `grad_scale` and `found_inf`, attributes that torch's GradScaler sets
    for it, so `scaler.unscale_(optimizer)` is not needed, not even for clipping. If only
    `grad_scale` is set, the step itself checks for non-finite gradients, and is skipped if there
    are any.

    A learning rate in a tensor is read on its device: change it in place under CUDA graphs and
    torch.compile. A captured graph keeps the value that a number, or a tensor on the CPU, had
    during the capture. Take one step before a capture.

    Masters are created at a parameter's first step. If other code writes a parameter later (loading
    or averaging models, masks), its master takes over the elements that were written. Writes under
    `torch.no_grad()` (but not through `.data`) between two eager steps of the same parameters, or
    between two steps of a `GraphedStep`, are all noticed, with a warning the first time. A GPU may
    miss any other write that changes fewer than 128 adjacent elements: call
    `sync_masters_from_model()` after writes. Tensors whose memory layout differs from their
    parameter's are copied for the step.

    Args:
        params: Tensors, pairs of names and tensors, or dicts of groups with options of their own.
        lr: Learning rate: a number, or a tensor with one element, which is read on its device.
        betas: Decay rates of the averages of the gradient and of its square.
        eps: Number added to the denominator.
        weight_decay: Factor of weight decay, which is decoupled from the gradient.
        amsgrad: Divide by the largest average of squares so far (AMSGrad), one more state tensor.
        maximize: Ascend instead of descend.
        master_weights: `"auto"` or True keep a float32 master of each 16-bit parameter, which then
            is the master rounded to nearest. `"remainder"` keeps only the 16 bits of the master
            that a bfloat16 parameter lacks, 2 bytes less per element. False steps 16-bit parameters
            themselves, which loses updates smaller than half their last bit. `"stochastic"` steps
            them, too, but rounds each up or down at random, in proportion, so that small updates
            take effect on average. It needs no memory; the random numbers depend on `seed`, the
            number of the step and the element's index, not on the device.
        state_dtype: Dtype of the moments, float32, bfloat16 or `"8bit"`. With bfloat16 set
            `betas[1]` to at most 0.99: with 0.999 the second moment cannot shrink, since rounding
            restores it. `"8bit"` keeps codes of the moments' square roots, 2.1 bytes per element
            for both moments, and suits all betas. It takes neither float64 parameters nor
            `amsgrad`.
        max_grad_norm: Clip the unscaled gradients to this norm, as `torch.nn.utils.clip_grad_norm_`
            does, or None. As an argument, it limits the norm over all groups without a limit of
            their own; as a group option, the norm of that group (inf: no clipping).
        write_back_grads: Leave the unscaled, clipped gradients in `.grad`.
        ema: Decay of an exponential average of the weights, for example 0.999, or None. The step
            updates the averages from the masters, in the same pass; see `averaged()`. A skipped
            step leaves them, and so does a step in which a parameter has no gradient.
        ema_dtype: Dtype of the averages, float32, or bfloat16, which is rounded at random.
        seed: Determines the random numbers of `"stochastic"`, `"8bit"` and bfloat16 averages.
        unscale: With `"before"`, a scaler unscales the gradients before it calls `step`, and does
            not call it if they overflow, as with torch's optimizers that are not fused. Choose it
            where a framework clips the gradients, or reads them in hooks (Lightning). It takes one
            more pass, and no process group. Scalers refuse to unscale float16 gradients, unless
            made with `allow_fp16_grads`. `"in_step"` leaves both to the step. `"auto"` is
            `"in_step"`, except while Accelerate, which Transformers uses, wraps `step` to notice
            whether it is called, and there is no process group.
        process_group: Ranks that step other parameters of the same model. Norms, and the decision
            to skip, then cover all ranks. A scaler's scale does not: pass the group to the scaler,
            too. An optimizer with a group cannot be pickled. Do not pass a group that shards
            DTensors. A ZeroRedundancyOptimizer would turn these arguments into group options: pass
            it
            `functools.partial(ampfuse.AdamW, max_grad_norm=..., process_group=...)` as
            `optimizer_class`.

    Raises:
        TypeError: An argument has a wrong type, or is one of torch's that choose an implementation
            (`foreach`, `fused`, `capturable`, `differentiable`), which do not exist here.
        ValueError: An argument is out of range.

    Examples:
        >>> import torch, ampfuse
        >>> model = torch.nn.Linear(4, 2, dtype=torch.bfloat16)
        >>> optimizer = ampfuse.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        >>> model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool | str = "auto",
        state_dtype: torch.dtype | str = torch.float32,
        max_grad_norm: float | None = None,
        write_back_grads: bool = False,
        ema: float | None = None,
        ema_dtype: torch.dtype = torch.float32,
        seed: int = 0,
        unscale: str = "auto",
        process_group: Any = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown(type(self).__init__, unknown, REMEDIES)
        Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            decoupled_weight_decay=True,
            master_weights=master_weights,
            state_dtype=state_dtype,
            max_grad_norm=max_grad_norm,
            write_back_grads=write_back_grads,
            ema=ema,
            ema_dtype=ema_dtype,
            seed=seed,
            unscale=unscale,
            process_group=process_group,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters as torch does; its options are checked like the constructor's.

        Args:
            param_group: A dict with `params`, and any options of a group.

        Raises:
            TypeError: An option has a wrong type.
            ValueError: An option is out of range, a parameter is in another group, or
                `decoupled_weight_decay` is False.
        """
        if param_group.get("decoupled_weight_decay") is False:
            raise ValueError("AdamW: decoupled_weight_decay: expected True, got False; use Adam")
        Adam.add_param_group(self, param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state as torch does; decay stays decoupled, whatever was loaded."""
        Adam.__setstate__(self, state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
