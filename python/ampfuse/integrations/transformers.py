"""Transformers: our optimizer and scaler in a `Trainer`."""

from typing import Any, TypeVar

import torch

from ampfuse.integrations import ScaleMetrics
from ampfuse.integrations.accelerate import use_scaler
from ampfuse.optim import AdamW

TORCHS_ADAMW = ("adamw_torch", "adamw_torch_fused")
T = TypeVar("T")  # a transformers.Trainer


def use_ampfuse(trainer: T, *, scaler: dict[str, Any] | None = None, **optimizer_options: Any) -> T:
    """Make a `Trainer` step with `ampfuse.AdamW` and, with `fp16=True`, our scaler.

    Call this once, before `train()`. Learning rate, betas, epsilon and weight decay are those of
    the `TrainingArguments`. The learning rate stands still when a step is skipped. The trainer's
    logs get `loss_scale` and `skipped_steps`, which its callbacks, such as those of TensorBoard and
    W&B, record.

    Args:
        trainer: A `transformers.Trainer` without an optimizer of its own, which is changed in
            place.
        scaler: Arguments of `ampfuse.GradScaler`, only with `TrainingArguments(fp16=True)`; or
            None.
        **optimizer_options: Further arguments of `ampfuse.AdamW`.

    Returns:
        The trainer.

    Raises:
        TypeError: `trainer` is something else, or an option of the optimizer is unknown.
        ValueError: The Trainer has another optimizer, or an option is out of range or not allowed.
    """
    inside: Any = trainer
    if not hasattr(inside, "create_accelerator_and_postprocess"):
        raise TypeError(f"trainer: expected a transformers.Trainer, got {type(trainer).__name__}")
    optim = getattr(inside.args.optim, "value", inside.args.optim)
    if optim not in TORCHS_ADAMW:
        raise ValueError(
            f"trainer: expected TrainingArguments with one of optim={TORCHS_ADAMW}, which "
            f"ampfuse.AdamW replaces, got {optim}"
        )
    AdamW([torch.zeros(1)], **optimizer_options)  # raises for invalid options
    is_ours = "get_optimizer_cls_and_kwargs" in vars(inside)
    if inside.optimizer is not None or inside.optimizer_cls_and_kwargs is not None or is_ours:
        raise ValueError(
            "trainer: expected a Trainer without an optimizer of its own; call use_ampfuse once, "
            "before train()"
        )

    def class_and_options(args: Any, model: Any = None) -> tuple[Any, dict[str, Any]]:
        of_arguments = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
        }
        return AdamW, {**of_arguments, **optimizer_options}

    is_scaled = inside.accelerator.mixed_precision == "fp16"
    if scaler is not None and not is_scaled:
        raise ValueError("scaler: expected TrainingArguments(fp16=True)")
    metrics = ScaleMetrics(use_scaler(inside.accelerator, **scaler or {})) if is_scaled else None
    # The Trainer calls these again in each trial of a search for hyperparameters.
    inside.get_optimizer_cls_and_kwargs = class_and_options
    if metrics is None:
        return trainer
    create, log = inside.create_accelerator_and_postprocess, inside.log

    def create_with_scaler() -> None:
        nonlocal metrics
        create()
        metrics = ScaleMetrics(use_scaler(inside.accelerator, **scaler or {}))

    def log_with_scale(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # of training
            read = metrics.read()  # nothing if the scaler is disabled
            logs |= {name: read[name] for name in ("loss_scale", "skipped_steps") if name in read}
        log(logs, *args, **kwargs)

    inside.create_accelerator_and_postprocess = create_with_scaler
    inside.log = log_with_scale
    return trainer
