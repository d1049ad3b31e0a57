"""A small transformer, and a whole training step as one function."""

import ampfuse
import torch
from optim_models import assert_same_bits
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, LENGTH = 37, 16, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (2, -1)).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.before_mlp(x))


class Transformer(nn.Module):
    """A transformer that returns its loss; with `linear_loss` it never holds all logits.

    Without blocks, which most tests do not need, it compiles in half of the time.
    """

    def __init__(self, linear_loss=False, checkpointing=False, blocks=0):
        super().__init__()
        self.linear_loss, self.checkpointing = linear_loss, checkpointing
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, target):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        x = self.norm(x).flatten(0, 1)
        if self.linear_loss:
            return ampfuse.linear_cross_entropy(
                x, self.head.weight, target.flatten(), self.head.bias
            )
        return ampfuse.cross_entropy(self.head(x), target.flatten())


def batch(device, seed=0, rows=4):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


class Training:
    """A training run from a fixed seed; two of them differ only in whether `step` is compiled."""

    def __init__(
        self,
        device,
        autocast=torch.bfloat16,
        *,
        model=None,
        max_grad_norm=1.0,
        clips=None,
        half=False,
        lr=None,
        batches=1,
        optimizer=ampfuse.AdamW,
        **options,
    ):
        torch.manual_seed(0)
        self.device, self.autocast, self.clips = device, autocast, clips
        self.model = (model or Transformer)().to(device)
        if half:
            self.model.bfloat16()
        self.params = list(self.model.parameters())
        self.factor = torch.ones((), device=device)  # multiplies the loss
        self.resets, self.batches = "by the optimizer", batches
        self.lr = torch.tensor(1e-2, device=device) if lr is None else lr
        self.optimizer = optimizer(
            self.model.parameters(),
            lr=self.lr,
            max_grad_norm=None if clips else max_grad_norm,
            **options,
        )
        self.scaler = ampfuse.GradScaler(device.type, 4.0, growth_interval=2, history=16)

    def loss(self, tokens, target):
        with torch.autocast(self.device.type, self.autocast):
            return self.model(tokens, target)

    def zero_grad(self):
        if self.resets == "by the optimizer":
            self.optimizer.zero_grad()
            return
        for param in self.params if self.resets == "by a list" else self.model.parameters():
            param.grad = None

    def step(self, tokens, target):
        self.zero_grad()
        for _ in range(self.batches):
            loss = self.loss(tokens, target) / self.batches
            self.scaler.scale(loss * self.factor).backward()
        if self.clips == "by hand":
            self.scaler.unscale_(self.optimizer)
            ampfuse.clip_grad_norm_(self.model.parameters(), 1.0)
        elif self.clips == "by the scaler":
            self.scaler.clip_grad_norm_(self.optimizer, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


class Twins:
    """The same training twice, compiled and eager."""

    def __init__(self, device, backend="aot_eager", **options):
        self.counter = CompileCounterWithBackend(backend)
        self.compiled, self.eager = (Training(device, **options) for _ in range(2))
        self.compiled_step = torch.compile(self.compiled.step, fullgraph=True, backend=self.counter)
        self.device = device

    def step(self, seed, rows=4):
        inputs = batch(self.device, seed, rows)
        return self.compiled_step(*inputs), self.eager.step(*inputs)

    @property
    def sides(self):
        return self.compiled, self.eager

    def assert_same_norms(self):
        assert_same_bits(*([side.optimizer.grad_norm] for side in self.sides))

    def assert_same(self):
        assert_same_bits(*(side.model.parameters() for side in self.sides))
        scalers = [side.scaler for side in self.sides]
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert scalers[0].was_skipped() == scalers[1].was_skipped()

    @property
    def operators(self):
        """The names of ampfuse's operators in all graphs, one entry per call."""
        nodes = [node for graph in self.counter.graphs for node in graph.graph.nodes]
        names = [str(node.target).split(".") for node in nodes]
        return sorted(name[1] for name in names if name[0] == "ampfuse")
