"""Lightning and Accelerate on two ranks: if one overflows, both skip, as with torch's AdamW."""

import os

import ampfuse
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from ampfuse.integrations.accelerate import use_scaler
from ampfuse.integrations.lightning import MixedPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision.amp import MixedPrecision as PlainPrecision
from processes import Scenarios
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

scenario = Scenarios()
SCALE = {"init_scale": 1024.0, "growth_interval": 4}
STEPS, OVERFLOW = 6, 2
OPTIMIZERS = {"torch": torch.optim.AdamW, "ours": ampfuse.AdamW}


def as_from_torchrun():
    """Set what torchrun would set; the process group exists already."""
    rank = str(dist.get_rank())
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0"}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "none"}
    os.environ.update({**ranks, **sizes, **address})


def data():
    inputs = torch.randn(8 * STEPS, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs[:, :1].sin())


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model, batch, index):
    loss = (model(batch[0]).float() - batch[1]).square().mean() * 10
    return loss * float("inf") if index == OVERFLOW and dist.get_rank() == 1 else loss


class Regression(LightningModule):
    def __init__(self, make):
        super().__init__()
        self.model, self.make = network(), make

    def training_step(self, batch, index):
        return loss_of(self.model, batch, index)

    def configure_optimizers(self):
        return self.make(self.parameters(), lr=0.02)


@scenario(*OPTIMIZERS)
def lightning(kind):
    as_from_torchrun()
    if kind == "ours":
        plugin = MixedPrecision("16-mixed", "cpu", **SCALE)
    else:
        plugin = PlainPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SCALE))
    module = Regression(OPTIMIZERS[kind])
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        plugins=[plugin],
        max_epochs=1,
        logger=False,
        gradient_clip_val=0.5,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(data(), batch_size=4))
    params = [param.detach().clone() for param in module.model.parameters()]
    return {"params": params, "scale": plugin.scaler.get_scale()}


@scenario(*OPTIMIZERS)
def accelerate(kind):
    as_from_torchrun()
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    if kind == "ours":
        use_scaler(accelerator, **SCALE)
    else:
        accelerator.scaler = torch.amp.GradScaler("cpu", **SCALE)
        accelerator.native_amp = True
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters(), lr=0.02)
    loader = DataLoader(data(), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    skipped = []
    for index, batch in enumerate(loader):
        accelerator.backward(loss_of(model, batch, index))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    params = [param.detach().clone() for param in model.parameters()]
    return {"params": params, "scale": accelerator.scaler.get_scale(), "skipped": skipped}


@pytest.mark.parametrize("framework", ["lightning", "accelerate"])
def test_both_ranks_skip_and_train_as_with_torch(framework):
    expected, found = scenario.results(framework, "torch"), scenario.results(framework, "ours")
    for mine, torchs, other in zip(found, expected, reversed(found), strict=True):
        assert mine["scale"] == torchs["scale"] < 1024.0 * 2
        assert mine.get("skipped") == torchs.get("skipped")
        torch.testing.assert_close(mine["params"], torchs["params"], rtol=1e-4, atol=1e-4)
        assert all(map(torch.equal, mine["params"], other["params"]))
    if framework == "accelerate":
        assert found[0]["skipped"] == [index == OVERFLOW for index in range(STEPS)]
