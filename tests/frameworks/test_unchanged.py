"""Frameworks with our optimizer and no integration train as with torch's optimizer."""

import copy
import warnings

import ampfuse
import pytest
import timm
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from peft import LoraConfig, get_peft_model
from small_llama import llama, texts
from timm.optim import param_groups_weight_decay
from timm.utils import NativeScaler
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer as TransformersTrainer
from transformers import TrainingArguments

NOTHING = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
QUIET = {"accelerator": "cpu", **dict.fromkeys(NOTHING, False)}


class Regression(LightningModule):
    """A small model, stepped by Lightning or by itself."""

    def __init__(self, make, manual=False, **options):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.make, self.options = make, options
        self.automatic_optimization = not manual

    def training_step(self, batch, index):
        loss = (self.model(batch[0]) - batch[1]).square().mean()
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return None

    def configure_optimizers(self):
        if self.automatic_optimization:
            return self.make(self.parameters(), lr=0.02, **self.options)
        layers = self.model[0], self.model[2]
        return [self.make(layer.parameters(), lr=0.02, **self.options) for layer in layers]


def batches():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=4)


def fit(make, manual=False, epochs=2, options=None, path=None, **of_trainer):
    module = Regression(make, manual, **(options or {}))
    trainer = Trainer(max_epochs=epochs, **{**QUIET, **of_trainer})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, batches(), ckpt_path=path)
    return trainer, [param.detach() for param in module.model.parameters()]


TRAINERS = {
    "steps of two optimizers by hand": lambda: {"manual": True},
    "accumulation": lambda: {"accumulate_grad_batches": 3},
    "scheduled accumulation": lambda: {
        "callbacks": GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    },
    "averaging": lambda: {
        "callbacks": WeightAveraging(avg_fn=lambda mean, new, _: 0.5 * mean + 0.5 * new)
    },
    "stochastic averaging": lambda: {
        "callbacks": StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
    },
    "clipping in float32": lambda: {"gradient_clip_val": 0.1},
    "bfloat16 autocast": lambda: {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("kind", TRAINERS)
def test_lightning_trains_as_with_torch(kind):
    _, expected = fit(torch.optim.AdamW, **TRAINERS[kind]())
    _, found = fit(ampfuse.AdamW, **TRAINERS[kind]())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("saves", "loads"),
    [(torch.optim.AdamW, ampfuse.AdamW), (ampfuse.AdamW, torch.optim.AdamW)],
    ids=["torch's", "ours"],
)
def test_checkpoints_of_lightning_load_into_the_other_optimizer(tmp_path, saves, loads):
    _, expected = fit(saves)
    trainer, _ = fit(saves, epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    _, found = fit(loads, path=tmp_path / "one.ckpt")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"master_weights": "remainder"}], ids=str)
def test_lightning_goes_on_with_bfloat16_weights_bit_for_bit(tmp_path, options):
    bfloat16 = {"precision": "bf16-true", "options": options}
    _, expected = fit(ampfuse.AdamW, **bfloat16)
    trainer, _ = fit(ampfuse.AdamW, epochs=1, **bfloat16)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    _, found = fit(ampfuse.AdamW, path=tmp_path / "one.ckpt", **bfloat16)
    assert all(map(torch.equal, found, expected))


def test_fabric_goes_on_from_its_checkpoint_bit_for_bit(tmp_path):
    def made(seed):
        fabric = Fabric(accelerator="cpu", precision="bf16-true")
        torch.manual_seed(seed)
        model = nn.Linear(8, 1)
        model, optimizer = fabric.setup(model, ampfuse.AdamW(model.parameters(), lr=0.02))
        return fabric, {"model": model, "optimizer": optimizer}

    def train(fabric, state):
        for inputs, _ in batches():
            fabric.backward(state["model"](inputs).square().mean())
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    fabric, first = made(0)
    train(fabric, first)
    fabric.save(tmp_path / "state.ckpt", first)
    other, second = made(1)
    other.load(tmp_path / "state.ckpt", second)
    train(fabric, first)
    train(other, second)
    assert all(map(torch.equal, first["model"].parameters(), second["model"].parameters()))


def trainer_of(model, folder, optimizer=None, **options):
    """Return a Trainer for random texts."""
    options = {
        "per_device_train_batch_size": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    } | options
    arguments = TrainingArguments(str(folder), **options)
    data = texts(16, 12)
    return TransformersTrainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))


@pytest.mark.parametrize(
    ("dtype", "master_weights"),
    [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "remainder")],
)
def test_trainer_goes_on_from_its_checkpoint_bit_for_bit(tmp_path, dtype, master_weights):
    models = whole, resumed = llama(dtype), llama(dtype)
    for model, path in zip(models, (None, str(tmp_path / "checkpoint-4")), strict=True):
        options = {"lr": 1e-3, "weight_decay": 0.0, "master_weights": master_weights}
        optimizer = ampfuse.AdamW(model.parameters(), **options)
        trainer = trainer_of(model, tmp_path, optimizer, save_strategy="steps", save_steps=4)
        trainer.train(resume_from_checkpoint=path)
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


@pytest.mark.parametrize(
    ("optim", "bf16"), [("adamw_torch", False), ("adamw_torch", True), ("adamw_torch_fused", True)]
)
def test_patched_trainer_trains_as_before(tmp_path, optim, bf16):
    expected, found = llama(), llama()
    trainer_of(expected, tmp_path, optim=optim, bf16=bf16).train()
    with ampfuse.patched():
        trainer = trainer_of(found, tmp_path, optim=optim, bf16=bf16)
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, ampfuse.AdamW)
    parameters = [list(model.parameters()) for model in (found, expected)]
    torch.testing.assert_close(*parameters, rtol=1e-3, atol=2e-4)


def test_adapters_of_peft_train_as_with_torch():
    def train(make):
        torch.manual_seed(0)
        model = get_peft_model(llama(), LoraConfig(target_modules=["q_proj", "v_proj"]))
        params = [param for param in model.parameters() if param.requires_grad]
        optimizer = make(params, lr=1e-2)
        tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
        for _ in range(4):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return copy.deepcopy(params)

    found, expected = train(ampfuse.AdamW), train(torch.optim.AdamW)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def losses_of_timm(make, scaler=None, clip=None, dtype=torch.float32):
    """Take steps as timm's training script does; return losses."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10)
    optimizer = make(model.parameters(), lr=1e-3)
    wrapped = NativeScaler("cpu")
    if scaler is not None:
        wrapped._scaler = scaler
    losses = []
    for _ in range(4):
        images, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = functional.cross_entropy(model(images).float(), labels)
        wrapped(loss, optimizer, clip_grad=clip, parameters=model.parameters())
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_timm_are_those_with_torch(clip, dtype):
    expected = losses_of_timm(torch.optim.AdamW, clip=clip, dtype=dtype)
    found = losses_of_timm(ampfuse.AdamW, ampfuse.GradScaler("cpu"), clip, dtype)
    assert found == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 2e-2)


def test_groups_of_timm_are_accepted():
    model = timm.create_model("test_resnet", num_classes=10)
    optimizer = ampfuse.AdamW(param_groups_weight_decay(model, 0.1), lr=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
