"""Trains the language model as torch's tutorials do: autocast, GradScaler, clipping, AdamW.

python train_torch.py [--precision float32|bfloat16|float16]
python -m ampfuse train_torch.py     # the same program, whose optimizer and loss are ampfuse's
"""

import torch
import torch.nn.functional as F
from measured import Measured, arguments
from model import LanguageModel
from torch import nn

options = arguments(__doc__)
device, dtype = options.device, getattr(torch, options.precision)

torch.manual_seed(0)
run = Measured(options)
model = LanguageModel(options.width, options.layers, options.recompute).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)

for micro_batches in run.batches():
    optimizer.zero_grad()
    total = torch.zeros((), device=device)
    for words, targets in micro_batches:
        with autocast, run.part("forward"):
            hidden = model(words)
        with autocast, run.part("loss"):
            logits = F.linear(hidden, model.embedding.weight)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(micro_batches)
        with run.part("backward"):
            scaler.scale(loss).backward()
        total += loss.detach()
    with run.part("optimizer"):
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    run.ended_step(total)

run.report()
