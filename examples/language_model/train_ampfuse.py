"""Trains the language model as train_torch.py does, with ampfuse.

python train_ampfuse.py [--precision bfloat16|float16] [--micro-batches 4] [--recompute]
"""

import ampfuse
import torch
from measured import Measured, arguments
from model import VOCABULARY, LanguageModel

options = arguments(__doc__)
device, dtype = options.device, getattr(torch, options.precision)

torch.manual_seed(0)
run = Measured(options)
model = LanguageModel(options.width, options.layers, options.recompute).to(device)
scaler = ampfuse.GradScaler(device, enabled=dtype == torch.float16)
# The last layer and the loss are one module, which never holds the logits of all rows at once.
head = ampfuse.LinearCrossEntropyLoss(options.width, VOCABULARY, scaler=scaler, device=device)
head.linear.weight = model.embedding.weight
# The optimizer unscales and clips in the same pass over memory in which it updates.
optimizer = ampfuse.AdamW(model.parameters(), lr=options.lr, max_grad_norm=1.0)
autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)

for micro_batches in run.batches():
    optimizer.zero_grad()
    total = torch.zeros((), device=device)
    # All micro-batches are divided by the number of targets in the step.
    denominator = sum(targets.numel() for _, targets in micro_batches)
    for words, targets in micro_batches:
        with autocast, run.part("forward"):
            hidden = model(words)
        with autocast, run.part("loss"):
            loss = head(hidden.flatten(0, 1), targets.flatten(), denominator=denominator)
        with run.part("backward"):
            scaler.scale(loss).backward()
        total += loss.detach()
    with run.part("optimizer"):
        scaler.step(optimizer)
        scaler.update()
    run.ended_step(total)

run.report()
