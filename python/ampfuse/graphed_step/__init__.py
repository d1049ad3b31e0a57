"""A training step as one CUDA graph, which the host only launches."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ampfuse import _C
from ampfuse._arguments import checked_count, type_name
from ampfuse._nested import params_of
from ampfuse.amp import GradScaler
from ampfuse.graphed_step._warm_up import warm_up
from ampfuse.optim import FusedOptimizer
from ampfuse.optim.options import check_limit

# Options that a program may change without knowing, and the remedies.
HINTS = {
    "model.training": "the model is in another mode: call model.train()",
    "betas": "pass cycle_momentum=False to the scheduler",
    "momentum of": "pass cycle_momentum=False to the scheduler",
}

# The attributes of a GraphedStep that a captured graph does not read again.
ARGUMENTS = ("model", "loss_fn", "optimizer", "scaler", "autocast", "max_grad_norm")

REHEARSALS = 3  # after these, libraries have chosen their kernels and allocated their memory


class GraphedStep:
    """Forward, loss, backward, unscaling, clipping, step and scale update: one launch on a GPU.

    `step(*batch)` computes `loss_fn(model(*batch[:-1]), batch[-1])`, trains the model on this loss,
    and returns it. A batch has as many tensors as `sample`, with the same shapes and dtypes. On a
    CPU the same step runs eagerly.

    On a GPU the constructor captures the step, after warm-up steps that change nothing: they are
    skipped, and buffers, gradients, random number generators and the scaler's state are restored.
    Each call copies its batch, which may be on the host, to the tensors that the graph reads. Do
    not write to a batch in pinned memory before that copy has finished. The graph updates the scale
    and skips steps by itself. Gradients stay in `.grad` until the next step. One scaler may serve
    several of these steps, for example for several shapes, and other steps in between.

    Fixed when the step is made; a step that finds a change raises:

    - the arguments of the constructor, and the options of the scaler
    - the options of the optimizer except `lr`: pass `cycle_momentum=False` to OneCycleLR and
      CyclicLR
    - which parameters are trained, and their addresses
    - which modules are in training mode: call `model.train()` after an evaluation
    - shapes and dtypes of a batch: drop a smaller last one (`drop_last=True`) or train on it
      eagerly
    - what the model and the loss do on the host, including hooks, which is done only in the
      constructor (the graph does not notice a change)

    May change between steps:

    - learning rates. They become tensors on the device, which schedulers write in place, so use
      `item()` to store or print one. A number that is assigned to `lr` is copied to the tensor; a
      tensor that is assigned is read at each step.
    - parameters, state and scale: checkpoints may be loaded, and are copied to the graph's tensors.

    To recompute activations in a graph (`torch.utils.checkpoint`), which saves memory, pass
    `preserve_rng_state=False`.

    Args:
        model: The module that is trained.
        loss_fn: A function or module that takes the model's output and the last tensor of a batch,
            and returns the loss, one number in a tensor.
        optimizer: `ampfuse.Adam`, `AdamW` or `SGD`; other optimizers are refused.
        scaler: An `ampfuse.GradScaler`; `GradScaler(enabled=False)` if losses are not scaled.
        sample: The tensors of a batch, all on the device of the model. Warm-up steps use them.
        autocast: The dtype in which forward and loss run, or None.
        max_grad_norm: Clip gradients to this norm between unscaling and the step, or None. The
            optimizer's own `max_grad_norm` costs less.
        micro_batches: Split each batch into this many equal parts along its first dimension, to use
            less memory. The step trains on the mean of the parts' losses, and returns it. Use a
            criterion without `scaler=`, since that expects losses that are not divided.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The sample is on several devices, or cannot be split.
        RuntimeError: No parameter of the optimizer gets a gradient; later, something fixed changed.

    Examples:
        >>> import torch, ampfuse
        >>> model = torch.nn.Linear(4, 3)
        >>> step = ampfuse.GraphedStep(
        ...     model,
        ...     torch.nn.functional.cross_entropy,
        ...     ampfuse.AdamW(model.parameters(), lr=0.1),
        ...     ampfuse.GradScaler("cpu"),
        ...     sample=(torch.ones(2, 4), torch.tensor([0, 2])),
        ... )
        >>> losses = [step(torch.ones(2, 4), torch.tensor([0, 2])).item() for _ in range(5)]
        >>> losses[4] < losses[0]
        True
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[Any, Tensor], Tensor],
        optimizer: FusedOptimizer,
        scaler: GradScaler,
        sample: Sequence[Tensor],
        *,
        autocast: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        micro_batches: int = 1,
    ) -> None:
        self.model, self.loss_fn = model, loss_fn
        self.optimizer, self.scaler = optimizer, scaler
        self.autocast, self.max_grad_norm = autocast, max_grad_norm
        _expect("model", model, nn.Module, "torch.nn.Module")
        _expect("optimizer", optimizer, FusedOptimizer, "ampfuse.Adam, AdamW or SGD")
        if scaler is None:
            raise TypeError(
                "scaler: expected ampfuse.GradScaler, got None: pass GradScaler(enabled=False) if "
                "losses are not scaled"
            )
        _expect("scaler", scaler, GradScaler, "ampfuse.GradScaler")
        if autocast is not None:
            _expect("autocast", autocast, torch.dtype, "a torch.dtype or None")
        check_limit(max_grad_norm)
        if isinstance(sample, Tensor):
            raise TypeError("sample: expected a sequence of tensors, got a tensor")
        self._sample = list(sample)
        self._device = _device_of(self._sample)
        self._micro_batches = _checked_split(micro_batches, self._sample)
        given = [group["lr"] for group in optimizer.param_groups]
        self._learning_rates = [_own_rate(lr, given, self._device) for lr in given]
        # The loss may be a module too, with buffers and a training mode of its own.
        self._roots = [each for each in (model, loss_fn) if isinstance(each, nn.Module)]
        self._modules = [module for root in self._roots for module in root.modules()]
        self._options = sorted((optimizer.defaults | optimizer.options_of({})).keys() - {"lr"})
        self._fixed = self._read_fixed()
        self._may_lack_gradients = scaler.is_enabled() and scaler.allow_no_grads
        self._graph: torch.cuda.CUDAGraph | None = None
        if self._device.type == "cuda":
            self._assign_rates(self._learning_rates)
            try:
                with torch.cuda.device(self._device):
                    self._capture()
            finally:
                self._assign_rates(given)
        self._put_learning_rates()

    def __call__(self, *batch: Tensor) -> Tensor:
        """Train on a batch and return the loss, which later steps do not overwrite.

        Args:
            *batch: Tensors of the shapes and dtypes of `sample`, on its device or on the host.

        Returns:
            The loss before the step, detached and not scaled, on the device.

        Raises:
            TypeError: The batch has another number of tensors.
            ValueError: A tensor has another shape or dtype, or requires grad.
            RuntimeError: Something that is fixed has changed.
            IndexError: A target was out of range in an earlier step.
            ScaleCollapseError: As from `GradScaler.update`.
        """
        self._check(batch)
        self._put_learning_rates()
        if self._graph is None:
            try:
                return self._step(batch)
            except BaseException:
                self.scaler.forget(self.optimizer)  # no update will follow
                raise
        _C.check_targets()
        self.optimizer.restore(self._states)
        for own, tensor in zip(self._sample, batch, strict=True):
            own.copy_(tensor, non_blocking=True)
        self._graph.replay()
        self._states.note_step()
        for param, grad in self._grads:
            if param.grad is not grad:  # other steps have gradients of their own
                param.grad = grad
        self.scaler.note_replay(self._captured)
        return self._loss.clone()

    def _check(self, batch: Sequence[Tensor]) -> None:
        if len(batch) != len(self._sample):
            hint = "; call step(*batch)" if len(batch) == 1 else ""
            raise TypeError(
                f"batch: expected {len(self._sample)} tensors, as in sample, got {len(batch)}{hint}"
            )
        for index, (tensor, sample) in enumerate(zip(batch, self._sample, strict=True)):
            _expect(f"batch[{index}]", tensor, Tensor, "a tensor")
            if tensor.requires_grad:
                raise ValueError(
                    f"batch[{index}]: expected a tensor that does not require grad, since the step "
                    "computes no gradients of its inputs"
                )
            if (tensor.shape, tensor.dtype) != (sample.shape, sample.dtype):
                raise ValueError(
                    f"batch[{index}]: expected {sample.dtype} of shape {tuple(sample.shape)}, as "
                    f"the sample is, got {tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        now = self._read_fixed()
        if now != self._fixed:
            changed = [name for name in self._fixed if now.get(name) != self._fixed[name]]
            hints = [hint for name, hint in HINTS.items() if any(name in one for one in changed)]
            raise RuntimeError(
                f"GraphedStep: changed since the step was made: {', '.join(changed)}; "
                f"{', or '.join([*hints, 'make a new GraphedStep'])}"
            )

    def _read_fixed(self) -> dict[str, Any]:
        """Return the values that are fixed in a graph, by name."""
        fixed = {
            **{f"step.{name}": getattr(self, name) for name in ARGUMENTS},
            "parameters": [
                (id(param), param.requires_grad, param.data_ptr())
                for param in params_of(self.optimizer)
            ],
            "model.training": [module.training for module in self._modules],
            "optimizer.max_grad_norm": self.optimizer.max_grad_norm,
        }
        for index, group in enumerate(self.optimizer.param_groups):
            options = self.optimizer.options_of(group)
            for name in self._options:
                value: Any = options.get(name)
                is_list = isinstance(value, list)  # betas, after loading from some files
                fixed[f"{name} of group {index}"] = tuple(value) if is_list else value
        if self.scaler.is_enabled():
            fixed["scaler.growth_factor"] = self.scaler.get_growth_factor()
            fixed["scaler.backoff_factor"] = self.scaler.get_backoff_factor()
            fixed["scaler.growth_interval"] = self.scaler.get_growth_interval()
            fixed["scaler's other options"] = self.scaler.policy
        return fixed

    def _put_learning_rates(self) -> None:
        """Copy assigned rates to the graph's tensors. Assigned tensors stay in their groups."""
        for group, own in zip(self.optimizer.param_groups, self._learning_rates, strict=True):
            if group["lr"] is not own:
                rate = torch.as_tensor(group["lr"], dtype=torch.float64).reshape(own.shape)
                own.copy_(rate, non_blocking=True)
                if not isinstance(group["lr"], Tensor):
                    group["lr"] = own

    def _assign_rates(self, rates: Sequence[float | Tensor]) -> None:
        for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = lr

    def _step(self, batch: Sequence[Tensor]) -> Tensor:
        count = self._micro_batches
        parts = [batch] if count == 1 else zip(*(one.chunk(count) for one in batch), strict=True)
        self.optimizer.zero_grad()
        losses = []
        for part in parts:
            loss = self._loss_of(part)
            if count > 1:
                loss = loss / count
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        if not self._may_lack_gradients:
            if all(param.grad is None for param in params_of(self.optimizer)):
                raise RuntimeError(
                    "optimizer: none of its parameters got a gradient; does it have the model's "
                    "parameters?"
                )
            self._may_lack_gradients = True  # in later steps
        if self.max_grad_norm is not None:
            self.scaler.clip_grad_norm_(self.optimizer, self.max_grad_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return sum(losses[1:], losses[0])

    def _loss_of(self, batch: Sequence[Tensor]) -> Tensor:
        context: Any = nullcontext()
        if self.autocast is not None:
            context = torch.autocast(self._device.type, self.autocast)
        with context:
            loss = self.loss_fn(self.model(*batch[:-1]), batch[-1])
        wanted = "it to return one number in a tensor"
        _expect("loss_fn", loss, Tensor, wanted)
        if loss.numel() != 1:
            raise TypeError(f"loss_fn: expected {wanted}, got shape {tuple(loss.shape)}")
        return loss

    # --- capture --------------------------------------------------------------------------------

    def _capture(self) -> None:
        self._sample = [tensor.detach().clone() for tensor in self._sample]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with (
            torch.cuda.stream(stream),
            warm_up(self._roots, self.optimizer, self.scaler, self._device),
        ):
            for _ in range(REHEARSALS):
                flag = torch.ones((), dtype=torch.float32, device=self._device)
                self.optimizer.found_inf = flag  # the step is skipped
                self._step(self._sample)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        torch.clear_autocast_cache()
        before = self.scaler.snapshot()
        try:
            # Other threads, for example of data loaders, may do what a global capture forbids.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._loss = self._step(self._sample)
            self._captured = self.scaler.snapshot()
        except BaseException:
            self.optimizer.zero_grad()
            raise
        finally:
            torch.clear_autocast_cache()
            self.scaler.restore(before)
        self._grads = [(param, param.grad) for param in params_of(self.optimizer)]
        self._states = self.optimizer.snapshot()
        self._graph = graph


def _own_rate(lr: float | Tensor, rates: list[Any], device: torch.device) -> Tensor:
    """Return a group's rate as a tensor on the device, a copy unless the group alone has it."""
    is_there = isinstance(lr, Tensor) and lr.device == device and lr.is_floating_point()
    if is_there and sum(lr is other for other in rates) == 1:
        return lr  # type: ignore[return-value]
    dtype = lr.dtype if is_there else torch.float64  # type: ignore[union-attr]
    return torch.as_tensor(lr, dtype=dtype).to(device, copy=True)


def _expect(name: str, value: Any, kind: type, described: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {described}, got {type_name(value)}")


def _device_of(sample: list[Tensor]) -> torch.device:
    """Return the device of all sample tensors; raise unless it is one CPU or one GPU."""
    for index, tensor in enumerate(sample):
        _expect(f"sample[{index}]", tensor, Tensor, "a tensor")
    names = sorted({str(tensor.device) for tensor in sample})
    if len(names) != 1 or sample[0].device.type not in ("cpu", "cuda"):
        got = ", ".join(names) or "nothing"
        raise ValueError(f"sample: expected tensors on one CPU or one GPU, got {got}")
    return sample[0].device


def _checked_split(micro_batches: int, sample: list[Tensor]) -> int:
    """Return `micro_batches`; raise unless each sample tensor can be split into that many parts."""
    micro_batches = checked_count("micro_batches", micro_batches, least=1)
    if micro_batches > 1:
        for index, tensor in enumerate(sample):
            if tensor.dim() == 0 or tensor.shape[0] % micro_batches:
                raise ValueError(
                    f"sample[{index}]: expected a first dimension that {micro_batches} "
                    f"micro_batches divide, got shape {tuple(tensor.shape)}"
                )
    return micro_batches
