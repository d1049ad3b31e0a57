"""Trains in float16 with pipeline parallelism: each rank holds a stage of the model.

torchrun --nproc_per_node 4 fp16_pipeline.py [--steps 200] [--result FILE]

Parameters are float16, so a stage computes and sends float16 without autocast. The optimizer keeps
a float32 master of each.
"""

import ampfuse
import torch
import torch.distributed as dist
from run_log import RunLog, arguments, end_rank, start_rank
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from transformer import LENGTH, SENTENCES, VOCABULARY, WIDTH, Transformer, batch

BLOCKS = 4
MICRO_BATCHES = 8

# Demonstration only. At some steps the loss of one micro-batch is multiplied, so that its gradients
# overflow. At others one gradient of the first stage becomes infinite, and no other.
OVERFLOWING_LOSSES = (30, 31, 90)
INFINITE_GRADIENTS = (60, 150)


class LanguageModel(nn.Module):
    """The transformer and its loss, of which each rank keeps a stage."""

    def __init__(self, scaler: ampfuse.GradScaler) -> None:
        super().__init__()
        self.transformer = Transformer(BLOCKS)
        self.head = ampfuse.LinearCrossEntropyLoss(WIDTH, VOCABULARY, scaler=scaler)


def main() -> None:
    """Train, and write the result."""
    options = arguments(__doc__)
    device = start_rank()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    is_first, is_last = rank == 0, rank == ranks - 1

    # Each rank has other parameters, and only the last one scales a loss. With the process_group
    # the scales, the norm, and the decision to skip are those of all ranks.
    everyone = dist.group.WORLD
    scaler = ampfuse.GradScaler(
        device.type, growth_interval=20, history=options.steps, process_group=everyone
    )
    torch.manual_seed(0)
    model = LanguageModel(scaler)
    model.transformer.keep_stage(rank, ranks)
    if not is_last:
        del model.head
    model.to(device, torch.float16)
    optimizer = ampfuse.AdamW(
        model.parameters(), lr=options.lr, max_grad_norm=0.5, process_group=everyone
    )
    log = RunLog(scaler, optimizer)
    losses: list[Tensor] = []  # of this step's micro-batches, on the last rank

    def scaled_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        # The denominator makes the sum over micro-batches the mean of the whole batch.
        loss = model.head(hidden, targets, denominator=SENTENCES * LENGTH)
        losses.append(loss.detach())
        scaled: Tensor = scaler.scale(loss)
        if step in OVERFLOWING_LOSSES and len(losses) == MICRO_BATCHES // 2:
            scaled = scaled * 2.0**120
        return scaled

    stage = PipelineStage(model.transformer, rank, ranks, device)
    # The losses are divided already, so the schedule need not divide the gradients.
    schedule = Schedule1F1B(stage, MICRO_BATCHES, scaled_loss, scale_grads=False)

    for step in range(options.steps):
        words, targets = (part.to(device) for part in batch(step))
        optimizer.zero_grad()
        losses.clear()
        schedule.step(*([words] if is_first else []), target=targets if is_last else None)
        if step in INFINITE_GRADIENTS and is_first:
            grad = model.transformer.embedding.weight.grad
            assert isinstance(grad, Tensor)
            grad[0, 0] = float("inf")
        scaler.step(optimizer)  # unscales, clips, and skips on all ranks if one overflows
        scaler.update()
        # In the first step torch 2.15 computes one more loss beforehand, to find its shape.
        loss = torch.stack(losses[-MICRO_BATCHES:]).sum() if is_last else torch.zeros(())
        log.ended_step(loss.to(device))

    if options.result:
        log.write(options.result, dict(model.named_parameters()))
    end_rank()


if __name__ == "__main__":
    main()
