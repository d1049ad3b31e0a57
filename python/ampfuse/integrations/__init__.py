"""Parts for other frameworks: the modules `lightning`, `accelerate`, `transformers`, `causal_lm`.

Each needs its framework, and is imported by its own name.
"""

from typing import Any

from ampfuse.amp import GradScaler

__all__ = ["ScaleMetrics"]

HISTORY = 1000  # updates that a scaler remembers for its metrics, unless asked for another number


def measured_scaler(device: str, options: dict[str, Any]) -> GradScaler:
    """Return a scaler with these options, and with a history for `ScaleMetrics`."""
    return GradScaler(device, **{"history": HISTORY, **options})


class ScaleMetrics:
    """Reads a scaler's numbers for a logger, for example `accelerator.log(metrics.read(), step)`.

    Skipped steps are counted from the first update in the scaler's history, which a checkpoint may
    have restored.

    Args:
        scaler: An `ampfuse.GradScaler` that was made with `history=`, at least as long as the steps
            between two reads. It may be disabled.

    Raises:
        TypeError: The scaler is another one.
        ValueError: The scaler was made without `history=`.

    Examples:
        >>> import torch, ampfuse
        >>> from ampfuse.integrations import ScaleMetrics
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = ampfuse.AdamW([param])
        >>> scaler = ampfuse.GradScaler("cpu", history=100)
        >>> metrics = ScaleMetrics(scaler)
        >>> scaler.scale((param * torch.tensor([3.0, 4.0])).sum()).backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> metrics.read()
        {'loss_scale': 65536.0, 'skipped_steps': 0, 'grad_norm': 5.0}
    """

    def __init__(self, scaler: GradScaler) -> None:
        if not isinstance(scaler, GradScaler):
            raise TypeError(f"scaler: expected ampfuse.GradScaler, got {type(scaler).__name__}")
        if scaler.is_enabled() and scaler._history.length == 0:
            raise ValueError(
                "scaler: expected one made with history=, as in GradScaler(history=100)"
            )
        self._scaler = scaler
        self._updates = self._skipped = 0  # until the last read

    def read(self) -> dict[str, float]:
        """Return the scale, the skipped steps so far, and the last norm. The host waits for them.

        Returns:
            Numbers by the names `loss_scale`, `skipped_steps` and `grad_norm`. The last one is left
            out if the last step computed no norm. A disabled scaler has no numbers.
        """
        if not self._scaler.is_enabled():
            return {}
        records, updates = self._scaler.history(), self._scaler._history.counts()[2]
        new = min(updates - self._updates, len(records))
        self._skipped += sum(record.skipped for record in records[len(records) - new :])
        self._updates = updates
        metrics: dict[str, float] = {
            "loss_scale": self._scaler.get_scale(),
            "skipped_steps": self._skipped,
        }
        if records and records[-1].norm == records[-1].norm:  # not NaN
            metrics["grad_norm"] = records[-1].norm
        return metrics
