"""Accelerate: our scaler in an `Accelerator`."""

from typing import Any

from accelerate import Accelerator, DistributedType

from ampfuse.amp import GradScaler
from ampfuse.integrations import measured_scaler


def use_scaler(accelerator: Accelerator, **options: Any) -> GradScaler:
    """Make an `Accelerator(mixed_precision="fp16")` use our scaler.

    Call this before `prepare()`. With our scaler or torch's, `ampfuse.AdamW` needs no setting:
    `accelerator.optimizer_step_was_skipped` is right, and prepared schedulers stand still when a
    step is skipped. On a CPU, where Accelerate computes in float32 despite "fp16", the model then
    computes in float16.

    Args:
        accelerator: The Accelerator, whose scaler is replaced.
        **options: Arguments of `ampfuse.GradScaler` except `device`. `history` is 1000 by default,
            and `process_group` is that of all ranks under FSDP1.

    Returns:
        The scaler.

    Raises:
        ValueError: The precision is not fp16, or DeepSpeed or Megatron-LM scales the loss.
        RuntimeError: An optimizer was prepared before.
    """
    if accelerator.mixed_precision != "fp16":
        raise ValueError(
            'accelerator: expected Accelerator(mixed_precision="fp16"), got '
            f'"{accelerator.mixed_precision}", which needs no scaler'
        )
    if accelerator._optimizers:
        raise RuntimeError("use_scaler: call it before accelerator.prepare()")
    if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(f"{accelerator.distributed_type.value} scales the loss by itself")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        import torch.distributed

        # FSDP1's gradients are plain tensors, different ones on each rank.
        options = {"process_group": torch.distributed.group.WORLD, **options}
    scaler = measured_scaler(accelerator.device.type, options)
    accelerator.scaler, accelerator.native_amp = scaler, True
    return scaler
