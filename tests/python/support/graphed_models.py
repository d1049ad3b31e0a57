"""A model and its training step in plain code, for comparison with `ampfuse.GraphedStep`."""

import ampfuse
import torch
from fake_graphs import capture
from optim_models import assert_same_bits
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

CLASSES = 5


class Model(nn.Module):
    """A model with buffers and random numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16),
            nn.BatchNorm1d(16),
            nn.GELU(),
            nn.Dropout(0.25),
            nn.Linear(16, CLASSES),
        )

    def forward(self, inputs):
        return self.layers(inputs)


class Checkpointed(Model):
    """The model with activations that backward recomputes."""

    def forward(self, inputs):
        return checkpoint(self.layers, inputs, use_reentrant=False, preserve_rng_state=False)


def batch(device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8, 6, generator=generator)
    return inputs.to(device), torch.randint(CLASSES, (8,), generator=generator).to(device)


def train_both(step, other, device, seeds):
    """Call both steps with the batches and the random numbers of these seeds."""
    for seed in seeds:
        for train in (step, other):
            torch.manual_seed(seed)
            train(*batch(device, seed))


class Side:
    """A model, its optimizer and scaler, and the training step in plain code."""

    def __init__(
        self,
        device,
        dtype=torch.bfloat16,
        clip=None,
        half=False,
        scaler=None,
        parts=1,
        checkpointed=False,
        make=ampfuse.AdamW,
        monkeypatch=None,
        **options,
    ):
        """Pass `monkeypatch` to capture steps on a CPU, too."""
        self.monkeypatch = monkeypatch
        torch.manual_seed(0)
        self.device, self.dtype, self.clip, self.parts = device, dtype, clip, parts
        self.model = (Checkpointed() if checkpointed else Model()).to(device)
        if checkpointed:
            self.model.layers[3] = nn.Identity()  # recomputed, it would draw other random numbers
        if half:
            self.model.bfloat16()
        options.setdefault("max_grad_norm", None if clip else 0.5)
        self.optimizer = make(self.model.parameters(), **{"lr": 1e-2, **options})
        self.scaler = ampfuse.GradScaler(
            device.type, 4.0, growth_interval=2, history=16, **(scaler or {})
        )

    def step(self, inputs, target):
        self.optimizer.zero_grad()
        whole = torch.zeros((), device=self.device)
        for rows, classes in zip(inputs.chunk(self.parts), target.chunk(self.parts), strict=True):
            with torch.autocast(self.device.type, self.dtype):
                loss = functional.cross_entropy(self.model(rows), classes) / self.parts
            self.scaler.scale(loss).backward()
            whole += loss.detach()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            ampfuse.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return whole

    def graphed(self, model=None, loss_fn=functional.cross_entropy):
        step = ampfuse.GraphedStep(
            model or self.model,
            loss_fn,
            self.optimizer,
            self.scaler,
            batch(self.device),
            autocast=self.dtype,
            max_grad_norm=self.clip,
            micro_batches=self.parts,
        )
        if self.monkeypatch is not None and self.device.type == "cpu":
            capture(step, self.monkeypatch)
        return step

    @property
    def tensors(self):
        """All tensors that training changes."""
        states = [*self.optimizer.state.values()]
        return [
            *self.model.parameters(),
            *self.model.buffers(),
            *(value for state in states for value in state.values()),
        ]

    @property
    def grads(self):
        return [param.grad for param in self.model.parameters()]

    def assert_same(self, other):
        assert_same_bits(self.tensors, other.tensors)
        assert self.scaler.state_dict() == other.scaler.state_dict()
        assert self.scaler.was_skipped() == other.scaler.was_skipped()
        histories = [torch.tensor(side.scaler.history()) for side in (self, other)]
        assert_same_bits(histories[:1], histories[1:])
