"""Distributes one language model over ranks in different ways, which all train it alike.

`memory_per_rank.py` compares what they cost.
"""

import math
import zlib
from functools import partial
from typing import Any

import ampfuse
import torch
import torch.distributed as dist
from ampfuse.distributed import join_ranks
from fp16_fsdp import PLAN
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformer import LENGTH, SENTENCES, VOCABULARY, Transformer

MICRO_BATCHES = 8  # of a pipeline


class LanguageModel(nn.Module):
    """The transformer, the last layer and the loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.transformer = Transformer(layers, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""
        return self.loss(self.transformer(words), targets)

    def loss(self, hidden: Tensor, targets: Tensor, denominator: int | None = None) -> Tensor:
        """Return the sum of the losses, divided by their number or by the denominator."""
        weight: Tensor = self.head.weight
        group = None
        if isinstance(weight, DTensor):  # with tensor parallelism each rank has some of the classes
            group, weight = weight.device_mesh.get_group(), weight.to_local()
        return ampfuse.linear_cross_entropy(
            hidden, weight, targets, denominator=denominator, process_group=group
        )


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def initialise(model: nn.Module, device: torch.device) -> None:
    """Allocate parameters, whose values do not depend on how the model is distributed.

    No rank ever has more than one whole parameter that it does not keep.
    """
    model.to_empty(device=device)
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        if param.dim() == 1:
            whole = torch.ones(param.shape)
        else:
            whole = torch.randn(param.shape, generator=generator) / math.sqrt(param.shape[-1])
        if isinstance(param, DTensor):
            mesh, placements = param.device_mesh, param.placements
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        local(param).copy_(local(whole))


class OneProcess:
    """Training without distribution. The subclasses change what differs."""

    device_of_params: str | None = None  # by default that of the computation
    has_shares = False  # whether each rank gets other sentences

    def __init__(self, layers: int, width: int, weights: torch.dtype, device: torch.device) -> None:
        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        with torch.device("meta"):
            self.model = LanguageModel(layers, width).to(weights)
        self.shard()
        initialise(self.model, torch.device(self.device_of_params or device))
        self.stage: PipelineStage | None = None
        self.trained = self.wrapped()
        self.optimizer = self.make_optimizer(
            partial(
                ampfuse.AdamW,
                max_grad_norm=1.0,
                master_weights="remainder" if weights == torch.bfloat16 else "auto",
            )
        )
        join_ranks(self.trained, self.optimizer, pipeline=self.stage)

    def shard(self) -> None:
        """Reduce the model to what this rank will hold. It has no memory yet."""

    def wrapped(self) -> nn.Module:
        """Return the module that computes the loss of the model."""
        return self.model

    def make_optimizer(self, optimizer_class: Any) -> Any:
        """Return the optimizer of this rank's parameters."""
        return optimizer_class(self.model.parameters(), lr=3e-4)

    def step(self, words: Tensor, targets: Tensor) -> Tensor:
        """Train one step. The loss of all sentences is the sum of what the ranks return."""
        self.optimizer.zero_grad()
        if self.has_shares:
            words, targets = (part.chunk(self.ranks)[self.rank] for part in (words, targets))
        loss = self.backward(words, targets)
        self.optimizer.step()
        return loss

    def backward(self, words: Tensor, targets: Tensor) -> Tensor:
        """Compute gradients, and return this rank's part of the loss."""
        loss: Tensor = self.trained(words, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach() / self.ranks


class DDP(OneProcess):
    """Each rank has all parameters, gradients and state, and a share of the sentences."""

    has_shares = True

    def wrapped(self) -> nn.Module:
        """Return the model, whose gradients are the buckets that ranks reduce."""
        return DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class ZeRO(DDP):
    """DDP, but each rank has the state of some parameters, and steps only these."""

    def make_optimizer(self, optimizer_class: Any) -> Any:
        """Return the optimizer that constructs ours for the parameters of this rank."""
        return ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class, lr=3e-4)


class FSDP2(OneProcess):
    """Each rank has a shard of each parameter, gradient and state, and a share of the sentences.

    The parameters of a block are gathered when it computes.
    """

    has_shares = True
    offload = OffloadPolicy()  # keeps all on the device

    def shard(self) -> None:
        """Shard each block, and then the parameters of no block."""
        mesh = init_device_mesh(self.device.type, (self.ranks,))
        for module in (*self.model.transformer.blocks.values(), self.model):
            fully_shard(module, mesh=mesh, offload_policy=self.offload)


class FSDP2Offload(FSDP2):
    """FSDP2 that keeps all shards on the host, where the optimizer steps."""

    device_of_params = "cpu"
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())


class TensorParallel(OneProcess):
    """Each rank has some heads, some columns of the perceptron, and some classes.

    All ranks have the weights of the norms, and all sentences.
    """

    def shard(self) -> None:
        """Shard all matrices."""
        parallelize_module(self.model, init_device_mesh(self.device.type, (self.ranks,)), PLAN)


class Pipeline(OneProcess):
    """Each rank has some of the blocks, and all sentences pass through all ranks."""

    def shard(self) -> None:
        """Remove the layers of the other ranks."""
        self.model.transformer.keep_stage(self.rank, self.ranks)
        if self.rank != self.ranks - 1:
            del self.model.head

    def wrapped(self) -> nn.Module:
        """Return the stage of this rank, and construct the schedule."""
        self.losses: list[Tensor] = []  # of the micro-batches, on the last rank
        self.stage = PipelineStage(self.model.transformer, self.rank, self.ranks, self.device)
        # The losses are divided already, so the schedule need not divide the gradients.
        self.schedule = Schedule1F1B(
            self.stage, MICRO_BATCHES, self.loss_of_micro_batch, scale_grads=False
        )
        return self.model.transformer

    def loss_of_micro_batch(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the part of the mean loss that a micro-batch has."""
        loss = self.model.loss(hidden, targets, denominator=SENTENCES * LENGTH)
        self.losses.append(loss.detach())
        return loss

    def backward(self, words: Tensor, targets: Tensor) -> Tensor:
        """Compute gradients, and return the loss on the last rank, 0 on the others."""
        is_last = self.rank == self.ranks - 1
        self.losses.clear()
        self.schedule.step(
            *([words] if self.rank == 0 else []), target=targets if is_last else None
        )
        # In the first step torch 2.15 computes one more loss beforehand, to find its shape.
        loss = torch.stack(self.losses[-MICRO_BATCHES:]).sum() if is_last else torch.zeros(())
        return loss.to(self.device)


STRATEGIES: dict[str, type[OneProcess]] = {
    "one process": OneProcess,
    "DDP": DDP,
    "DDP + ZeRO": ZeRO,
    "FSDP2": FSDP2,
    "FSDP2 + offload": FSDP2Offload,
    "tensor parallel": TensorParallel,
    "pipeline": Pipeline,
}
