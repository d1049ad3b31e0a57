"""The lines of a program that a precision changes."""

import torch

from ampfuse.tools.precision.outcome import Outcome
from ampfuse.tools.precision.precisions import FIRST_SCALE, Precision

LIGHTNING: dict[torch.dtype | None, str] = {
    torch.bfloat16: 'Trainer(precision="bf16-mixed")',
    torch.float16: 'Trainer(precision="16-mixed")',
    None: 'Trainer(precision="32-true")',
}
# Trainers that choose the precision by an option: the folder of their package, and the option for
# each dtype of autocast; None is float32.
TRAINERS: dict[str, dict[torch.dtype | None, str]] = {
    "transformers": {
        torch.bfloat16: "bf16=True in TrainingArguments",
        torch.float16: "fp16=True in TrainingArguments",
        None: "neither bf16 nor fp16 in TrainingArguments",
    },
    "accelerate": {
        torch.bfloat16: 'Accelerator(mixed_precision="bf16")',
        torch.float16: 'Accelerator(mixed_precision="fp16")',
        None: 'Accelerator(mixed_precision="no")',
    },
    "lightning": LIGHTNING,
    "pytorch_lightning": LIGHTNING,
}


def lines_to_change(base: Outcome, precision: Precision, scale: float) -> list[str]:
    """Return instructions, each with the line of the program that it is about."""
    places = base.data["places"]
    device = "cuda" if base.data["gpu"] else "cpu"
    trainer = trainer_of(places)
    if precision.dtype is None:
        found = [
            f"{shown(places[name])}: add enabled=False"
            for name in ("autocast", "scaler")
            if places[name]
        ]
        return [trainer[None]] if trainer and found else found
    if trainer and not precision.kept:
        lines = [trainer[precision.dtype]]
    else:
        lines = by_hand(places, device, base.data["own_dtype"], precision, scale)
    if precision.has_16bit_weights:
        name = base.data["optimizer"]
        lines += [
            f"{shown(places['optimizer'])}: before it, "
            "`for param in model.parameters(): "
            "param.data = param.data.bfloat16() if param.dim() > 1 else param.data`",
            f"the same line: `ampfuse.{name}` in place of `torch.optim.{name}`, with "
            "`import ampfuse` above; it keeps float32 masters",
            "wherever the model is evaluated: the same autocast",
        ]
    return lines


def trainer_of(places: dict[str, dict[str, str] | None]) -> dict[torch.dtype | None, str] | None:
    """Return the options of the package that calls the model or backward, or None."""
    folders = [
        (places[name] or {}).get("where", "").split("/")[0] for name in ("model", "backward")
    ]
    return next((TRAINERS[folder] for folder in folders if folder in TRAINERS), None)


def by_hand(
    places: dict[str, dict[str, str] | None],
    device: str,
    own: str,
    precision: Precision,
    scale: float,
) -> list[str]:
    """Return instructions for a program that has its own loop."""
    lines = []
    dtype = str(precision.dtype)
    context = f'with torch.autocast("{device}", dtype={dtype}):'
    if places["autocast"] is None:
        lines.append(
            f"{shown(places['model'])}: put it and the loss, but not backward(), into `{context}`"
        )
    elif f"torch.{own}" != dtype:
        lines.append(f"{shown(places['autocast'])}: `{context}`")
    if precision.is_scaled and places["scaler"] is None:
        first = "" if scale == FIRST_SCALE else f", init_scale={scale:.0f}"
        lines += [
            f'before the loop: `scaler = torch.amp.GradScaler("{device}"{first})`',
            f"{shown(places['backward'])}: `scaler.scale(loss).backward()`",
            f"{shown(places['step'])}: `scaler.step(optimizer)`, then `scaler.update()`",
            "before gradients are clipped, if they are: `scaler.unscale_(optimizer)`",
        ]
    elif not precision.is_scaled and places["scaler"] is not None:
        lines.append(f"{shown(places['scaler'])}: add enabled=False")
    for name in precision.kept:
        lines.append(
            f'around the call of `{name}`: `with torch.autocast("{device}", enabled=False):`, '
            "and give it x.float()"
        )
    return lines


def shown(place: dict[str, str] | None) -> str:
    """Return a place and its text."""
    if place is None:
        return "the program"
    return f"{place['where']} `{place['text']}`" if place["text"] else place["where"]
