"""Lightning: precision plugins for Trainer and Fabric, and a callback that logs the scaler."""

from typing import Any

from lightning.fabric.plugins.precision import amp as fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import amp as trainers
from lightning.pytorch.plugins.precision.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType

from ampfuse._nested import unwrapped
from ampfuse.amp import GradScaler
from ampfuse.integrations import ScaleMetrics, measured_scaler
from ampfuse.optim import FusedOptimizer
from ampfuse.optim.stepping import takes_tensors


def _scaler(precision: str, device: str, options: dict[str, Any]) -> GradScaler | None:
    if precision == "16-mixed":
        return measured_scaler(device, options)
    if options:
        raise ValueError(
            f"precision: expected '16-mixed' with the scaler's options {sorted(options)}, got "
            f"{precision!r}, which needs no scaler"
        )
    return None


class MixedPrecision(trainers.MixedPrecision):
    """`Trainer(plugins=MixedPrecision("16-mixed"))`: mixed precision with our scaler.

    It replaces `Trainer(precision="16-mixed")` or `"bf16-mixed"`.

    With `gradient_clip_val`, `ampfuse.AdamW` clips the norm inside its step, in place of its own
    `max_grad_norm`. Groups with a `max_grad_norm` keep theirs. Clipping by value unscales the
    gradients first. Hooks such as `on_before_optimizer_step` see gradients that are still scaled,
    unless the optimizer was made with `unscale="before"`.

    Args:
        precision: `"16-mixed"`, or `"bf16-mixed"`, which needs no scaler.
        device: Type of the device, `"cuda"` or `"cpu"`.
        **scaler_options: Further arguments of `ampfuse.GradScaler`, for example
            `growth_interval=500`. `history` is 1000 by default.

    Raises:
        ValueError: There are options of a scaler, but the precision needs none.
    """

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", **scaler_options: Any
    ) -> None:
        super().__init__(precision, device, _scaler(precision, device, scaler_options))
        # The limits of optimizers that are to be clipped.
        self._own_limits: dict[FusedOptimizer, float | None] = {}

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step, as Lightning calls it. The limit that `clip_gradients` has set is for this step.

        Args:
            optimizer: The optimizer, which Lightning may have wrapped.

        Returns:
            The result of Lightning's method.
        """
        try:
            return super().optimizer_step(optimizer, *args, **kwargs)
        finally:
            stepped = unwrapped(optimizer)
            if stepped in self._own_limits:
                stepped.max_grad_norm = self._own_limits.pop(stepped)

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: float = 0.0,
        gradient_clip_algorithm: Any = GradClipAlgorithmType.NORM,
    ) -> None:
        """Clip gradients, as Lightning calls it, or let the optimizer clip them in its step.

        Args:
            optimizer: The optimizer, which Lightning may have wrapped.
            clip_val: The largest norm or value; 0 or less clips nothing.
            gradient_clip_algorithm: Lightning's choice between norm and value.
        """
        if clip_val <= 0:
            return
        optimizer = unwrapped(optimizer)
        is_norm = gradient_clip_algorithm == GradClipAlgorithmType.NORM
        if isinstance(optimizer, FusedOptimizer) and is_norm:
            self._own_limits.setdefault(optimizer, optimizer.max_grad_norm)
            optimizer.max_grad_norm = clip_val
            return
        if self.scaler is not None and takes_tensors(optimizer):  # Lightning leaves it to its step
            self.scaler.unscale_(optimizer)
        Precision.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


class FabricMixedPrecision(fabric.MixedPrecision):
    """`Fabric(plugins=FabricMixedPrecision("16-mixed"))`: mixed precision with our scaler.

    `fabric.clip_gradients` unscales the gradients first. `ampfuse.AdamW(max_grad_norm=...)` clips
    in its step, which costs less.

    Args:
        precision: `"16-mixed"`, or `"bf16-mixed"`, which needs no scaler.
        device: Type of the device, `"cuda"` or `"cpu"`.
        **scaler_options: Further arguments of `ampfuse.GradScaler`. `history` is 1000 by default.

    Raises:
        ValueError: There are options of a scaler, but the precision needs none.
    """

    def __init__(
        self, precision: str = "16-mixed", device: str = "cuda", **scaler_options: Any
    ) -> None:
        super().__init__(precision, device, _scaler(precision, device, scaler_options))

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale gradients before they are clipped, also for optimizers that do it themselves.

        Args:
            optimizer: The optimizer whose gradients are unscaled in place.
        """
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)


class ScaleLogger(Callback):
    """Logs `loss_scale`, `skipped_steps` and `grad_norm` with the Trainer's own loggers.

    It logs when the number of steps is a multiple of `log_every_n_steps`. The host waits only then.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check that there is a scaler to log.

        Args:
            trainer: The Trainer.
            pl_module: The model, which is not used.

        Raises:
            TypeError: The Trainer has no scaler of ours.
        """
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if not isinstance(scaler, GradScaler):
            raise TypeError(
                "ScaleLogger: expected Trainer(plugins=ampfuse.integrations.lightning."
                f"MixedPrecision('16-mixed')), got the scaler {scaler}"
            )
        self._metrics, self._logged = ScaleMetrics(scaler), 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Log, if this batch completed a step that is logged.

        Args:
            trainer: The Trainer.
        """
        step = trainer.global_step
        every = trainer.log_every_n_steps  # 0: never
        if every == 0 or step == self._logged or step % every:
            return
        self._logged = step
        for logger in trainer.loggers:
            logger.log_metrics(self._metrics.read(), step=step)
