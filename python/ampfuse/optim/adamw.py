"""AdamW: `Adam` as `torch.optim.AdamW` has it."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ampfuse.optim.adam import Adam


class AdamW(Adam):
    """`Adam` with decoupled weight decay: `torch.optim.AdamW`."""

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
        process_group: Any = None,
    ) -> None:
        super().__init__(
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
            process_group=process_group,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; a group whose decay is not decoupled belongs into `Adam`."""
        if param_group.get("decoupled_weight_decay") is False:
            raise ValueError("AdamW: decoupled_weight_decay: expected True, got False; use Adam")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's: whatever was loaded, decay stays decoupled."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True
