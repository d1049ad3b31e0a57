"""Trains the language model as train_torch.py does, with ampfuse.

python train_ampfuse.py [--precision bfloat16|float16]
"""

import ampfuse
import torch
from measured import Measured, arguments
from model import VOCABULARY, WIDTH, LanguageModel

options = arguments(__doc__)
device, dtype = options.device, getattr(torch, options.precision)

torch.manual_seed(0)
run = Measured(options)
model = LanguageModel().to(device)
scaler = ampfuse.GradScaler(device, enabled=dtype == torch.float16)
# The last layer and the loss are one module, which never holds the logits of all rows at once.
head = ampfuse.LinearCrossEntropyLoss(WIDTH, VOCABULARY, scaler=scaler, device=device)
head.linear.weight = model.embedding.weight
# The optimizer unscales and clips in the same pass over memory in which it updates.
optimizer = ampfuse.AdamW(model.parameters(), lr=options.lr, max_grad_norm=1.0)
autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)

for words, targets in run.batches():
    optimizer.zero_grad()
    with autocast, run.part("forward"):
        hidden = model(words)
    with autocast, run.part("loss"):
        loss = head(hidden.flatten(0, 1), targets.flatten())
    with run.part("backward"):
        scaler.scale(loss).backward()
    with run.part("optimizer"):
        scaler.step(optimizer)
        scaler.update()
    run.ended_step(loss)

run.report()
