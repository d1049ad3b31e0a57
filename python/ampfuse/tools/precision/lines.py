"""The lines of a program that a precision changes."""

from ampfuse.tools.precision.outcome import Outcome
from ampfuse.tools.precision.precisions import FIRST_SCALE, Precision


def lines_to_change(base: Outcome, precision: Precision, scale: float) -> list[str]:
    """Return instructions, each with the line of the program that it is about."""
    places = base.data["places"]
    device = "cuda" if base.data["gpu"] else "cpu"
    if precision.dtype is None:
        return [
            f"{shown(places[name])}: add enabled=False"
            for name in ("autocast", "scaler")
            if places[name]
        ]
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
