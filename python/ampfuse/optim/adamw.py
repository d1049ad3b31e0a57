"""AdamW: `Adam` with decoupled weight decay, like `torch.optim.AdamW`."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse._arguments import refuse_unknown
from ampfuse.optim._options import REMEDIES as ADAM_REMEDIES
from ampfuse.optim.adam import Adam

REMEDIES = ADAM_REMEDIES | {"decoupled_weight_decay": "it is always True in AdamW; use Adam"}


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` with master weights, clipping and unscaling inside the step.

    This is `Adam` with decoupled weight decay; see its documentation. Arguments that torch does not
    have: `master_weights` (`"auto"`, True, `"remainder"`, False), `state_dtype` of the moments,
    `max_grad_norm` (over all groups; as a group option, of that group), `write_back_grads`,
    `unscale` (`"auto"`, `"in_step"`, `"before"`), and `process_group` for norms over ranks. Of
    these, the constructor's are not saved in state dicts, but those of a group are. The arguments
    `foreach`, `fused`, `capturable` and `differentiable`, which choose one of torch's
    implementations, do not exist here.

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
        state_dtype: torch.dtype = torch.float32,
        max_grad_norm: float | None = None,
        write_back_grads: bool = False,
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
            unscale=unscale,
            process_group=process_group,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does; raise if its weight decay is not decoupled."""
        if param_group.get("decoupled_weight_decay") is False:
            raise ValueError("AdamW: decoupled_weight_decay: expected True, got False; use Adam")
        Adam.add_param_group(self, param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state as torch does; decay stays decoupled, whatever was loaded."""
        Adam.__setstate__(self, state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
