"""Trains in float16 with FSDP2 and tensor parallelism, on a mesh of two dimensions.

torchrun --nproc_per_node 4 fp16_fsdp.py [--steps 200] [--result FILE]

Parameters, gradients and moments are float32, and sharded over all ranks. For forward and backward
FSDP2 gathers float16 copies of the parameters, and it sums gradients in float32. float16 parameters
with float32 masters would take as many bytes, 16 per parameter, and round the gradients again.
"""

import ampfuse
import torch
import torch.distributed as dist
from run_log import RunLog, arguments, end_rank, start_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformer import VOCABULARY, WIDTH, Transformer, batch

PLAN: dict[str, ParallelStyle] = {
    "transformer.embedding": RowwiseParallel(input_layouts=Replicate()),
    "transformer.blocks.*.attention_in": ColwiseParallel(),
    "transformer.blocks.*.attention_out": RowwiseParallel(),
    "transformer.blocks.*.up": ColwiseParallel(),
    "transformer.blocks.*.down": RowwiseParallel(),
    "head": ColwiseParallel(),
}

# Demonstration only. At some steps the last data-parallel rank multiplies its loss, so that its
# gradients overflow. At others one gradient of the last rank becomes infinite, and no other.
OVERFLOWING_LOSSES = (30, 31, 90)
INFINITE_GRADIENTS = (60, 150)


class LanguageModel(nn.Module):
    """The transformer and its loss. Each tensor-parallel rank holds a shard of the vocabulary."""

    def __init__(self, scaler: ampfuse.GradScaler, tensor_mesh: DeviceMesh) -> None:
        super().__init__()
        self.transformer = Transformer(blocks=2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.scaler, self.group = scaler, tensor_mesh.get_group()

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, without the logits of all words in memory."""
        # In the forward of the module whose fully_shard group holds the weight, FSDP2 has gathered
        # the shard of this tensor-parallel rank.
        weight = self.head.weight
        assert isinstance(weight, DTensor)
        return ampfuse.linear_cross_entropy(
            self.transformer(words),
            weight.to_local(),
            targets,
            grad_scale=self.scaler.scale_tensor(),
            process_group=self.group,
        )


def shard(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Shard the parameters, first for tensor parallelism and then for FSDP2."""
    parallelize_module(model, mesh["tensor"], PLAN)
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for module in (*model.transformer.blocks.values(), model):
        fully_shard(module, mesh=mesh["data"], mp_policy=policy)


def gathered(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters without their sharding. All ranks call this."""
    shards = {name: param for name, param in model.named_parameters() if isinstance(param, DTensor)}
    return {name: shard.full_tensor() for name, shard in shards.items()}


def main() -> None:
    """Train, and write the result."""
    options = arguments(__doc__)
    device = start_rank()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shape = (ranks // 2, 2) if ranks % 2 == 0 else (ranks, 1)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    data_rank, data_ranks = mesh["data"].get_local_rank(), mesh["data"].size()

    # All parameters are DTensors. Their meshes show which ranks hold the other shards, so neither
    # the scaler nor the optimizer needs a process_group.
    scaler = ampfuse.GradScaler(device.type, growth_interval=20, history=options.steps)
    torch.manual_seed(0)  # the same initial weights on all ranks
    model = LanguageModel(scaler, mesh["tensor"]).to(device)
    shard(model, mesh)
    optimizer = ampfuse.AdamW(model.parameters(), lr=options.lr, max_grad_norm=0.5)
    log = RunLog(scaler, optimizer)

    for step in range(options.steps):
        words, targets = (part.chunk(data_ranks)[data_rank].to(device) for part in batch(step))
        optimizer.zero_grad()
        loss = model(words, targets)
        scaled = scaler.scale(loss)
        if step in OVERFLOWING_LOSSES and data_rank == data_ranks - 1:
            scaled = scaled * 2.0**120
        scaled.backward()
        if step in INFINITE_GRADIENTS and rank == ranks - 1:
            grad = model.head.weight.grad
            assert isinstance(grad, DTensor)
            grad.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)  # unscales, clips, and skips on all ranks if one overflows
        scaler.update()
        log.ended_step(loss / ranks)

    if options.result:
        log.write(options.result, gathered(model))
    end_rank()


if __name__ == "__main__":
    main()
