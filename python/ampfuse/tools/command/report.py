"""The report on a program that was run with ampfuse, as plain numbers and strings."""

import itertools
import json
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import ampfuse
from ampfuse._graphs import compiled_graphs, uses_gpu
from ampfuse.amp import GradScaler
from ampfuse.patching.parts import Part
from ampfuse.tools.diagnosis.diagnosis import Diagnosis

SKIPS_IN_A_ROW = 10
UPDATES_TO_JUDGE = 20
ONLY_SCALES = (
    "A GradScaler has scaled losses, but taken no step. If their optimizer has stepped by "
    "optimizer.step(), its gradients were still multiplied by the loss scale: call "
    "scaler.step(optimizer) instead, and then scaler.update()."
)
MANY_SKIPS = 0.1  # of the updates
FAR = 2**10  # the factor by which a scale has fallen far
COMPILED = "Calls inside torch.compile are not counted; scalers count their steps there, too."


def report(
    program: str, parts: list[Part], diagnosis: Diagnosis, seconds: float, ended: str
) -> dict[str, Any]:
    """Return the whole report as nested dicts and lists."""
    scalers: list[dict[str, Any]] = []
    hints = [COMPILED] if compiled_graphs() else []
    usage = next((part.usage for part in parts if part.name == "scaler"), None)
    is_used = any(not GradScaler.is_unused(scaler) for scaler in diagnosis.scalers.enabled)
    has_scaler = diagnosis.clock.has_scaled or is_used
    hints += diagnosis.hints(bool(usage is None or has_scaler or usage.fallbacks))
    for scaler in diagnosis.scalers.enabled:
        try:
            if diagnosis.clock.steps and scaler.only_scales():
                hints.append(ONLY_SCALES)
            hints += scaler.mistakes()
            scalers.append(_describe_scaler(scaler))
        except Exception as error:  # for example a GPU error that the program has caused
            hints.append(f"The record of a scaler cannot be read: {error}")
    hints += [hint for scaler in scalers for hint in _hints(scaler)]
    return {
        "program": program,
        "ampfuse": ampfuse.__version__,
        "torch": torch.__version__,
        "seconds": seconds,
        "ended": ended,
        "parts": {
            part.name: {
                "used": part.usage.uses,
                "waits_avoided": part.usage.waits_avoided,
                "left_to_torch": dict(part.usage.fallbacks),
            }
            for part in parts
        },
        "optimizers_of_torch": sorted(diagnosis.clock.left_to_torch),
        "scalers": scalers,
        "scaler_disabled": diagnosis.scalers.has_disabled and not has_scaler,
        "autocast": diagnosis.autocast(),
        "step_count": diagnosis.clock.steps,
        "steps": diagnosis.steps(),
        "error": None if diagnosis.clock.error is None else repr(diagnosis.clock.error),
        "memory": diagnosis.memory(),
        "peak_memory": _peak_memory(),
        "hints": hints,
    }


def write(report: dict[str, Any], path: Path) -> None:
    """Write a report as JSON, with null for NaN and infinities."""
    finite = json.loads(json.dumps(report), parse_constant=lambda _: None)
    path.write_text(json.dumps(finite, indent=2) + "\n")


def how_it_ended(raised: BaseException | None) -> str:
    """Describe the end of a program that raised this exception, or none."""
    if raised is None:
        return "normally"
    if isinstance(raised, SystemExit):
        return f"by sys.exit({'' if raised.code is None else repr(raised.code)})"
    message = (str(raised).strip().splitlines() or [""])[0]
    return f"by {type(raised).__name__}" + (f" ({message})" if message else "")


def _describe_scaler(scaler: GradScaler) -> dict[str, Any]:
    history = GradScaler.history(scaler)  # the program may have replaced `history`
    updates = scaler._history.recorded_updates()
    return {
        "updates": updates,
        "taken": sum(not record.skipped for record in history),
        "skipped": sum(record.skipped for record in history),
        "scale": GradScaler.get_scale(scaler),
        "history": [list(record) for record in history],
    }


def _hints(scaler: dict[str, Any]) -> Iterable[str]:
    history = scaler["history"]
    # The last half, each step with True if the scale, which is that of the step, has just grown.
    pairs = list(itertools.pairwise(history))[max(len(history) // 2 - 1, 0) :]
    grown = [after[0] > before[0] for before, after in pairs if after[1]]
    report = "scaler.overflow_report(model), of an ampfuse.GradScaler, names the parameters."
    if len(history) >= SKIPS_IN_A_ROW and all(record[1] for record in history[-SKIPS_IN_A_ROW:]):
        yield (
            f"The last {SKIPS_IN_A_ROW} steps were skipped, and the loss scale is now "
            f"{scaler['scale']:.3g}: gradients are not finite at any scale that was tried, so "
            "nothing is learned. Look for a NaN or an infinity in the loss, the data or the "
            f"learning rate; {report}"
        )
    elif len(pairs) >= UPDATES_TO_JUDGE and len(grown) > MANY_SKIPS * len(pairs):
        reason = (
            "most of them after the scale had grown, so it grows too often: use "
            "GradScaler(growth_interval=2000), or more."
            if sum(grown) > len(grown) / 2
            else "at scales that were not too high for other steps: some batches have gradients "
            f"that are not finite. {report}"
        )
        yield f"{len(grown)} of the last {len(pairs)} steps were skipped, {reason}"
    elif history and scaler["scale"] < min(1, history[0][0] / FAR):
        yield (
            f"The loss scale has fallen to {scaler['scale']:.3g}: it is halved more often than it "
            "grows, and below 1 it makes small gradients zero. Some batches have gradients that "
            f"are not finite. {report}"
        )


def _peak_memory() -> dict[str, int]:
    peaks = {"host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}  # given in KiB
    if torch.cuda.is_available() and uses_gpu():
        for index in range(torch.cuda.device_count()):
            peaks[f"cuda:{index}"] = torch.cuda.max_memory_allocated(index)
    return peaks
