"""Lightning's Trainer and Fabric with our optimizer, scaler and plugins, against torch's AdamW."""

import functools

import ampfuse
import pytest
import torch
from ampfuse.distributed import norms_in_backward
from ampfuse.gradients.backward_norms import BackwardNorms
from ampfuse.integrations.lightning import FabricMixedPrecision, MixedPrecision, ScaleLogger
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision.amp import MixedPrecision as PlainFabricPrecision
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision.amp import MixedPrecision as PlainPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, OVERFLOW = 8, 3
SCALE = {"init_scale": 1024.0, "growth_interval": 4}
CLIPPING = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1},
    "value": {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
}


class Regression(LightningModule):
    """A model whose loss overflows in one step."""

    def __init__(self, make, **options):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.make, self.options = make, options
        self.seen = []

    def training_step(self, batch, index):
        inputs, target = batch
        loss = (self.model(inputs).float() - target).square().mean() * 10
        return loss * float("inf") if index == OVERFLOW else loss

    def configure_optimizers(self):
        optimizer = self.make(self.parameters(), lr=0.02, **self.options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(self.model[2].bias.grad.item())


class Records(Logger):
    """A logger that keeps what it gets."""

    def __init__(self):
        super().__init__()
        self.logged = []

    name, version, experiment = "records", 0, None

    def log_hyperparams(self, *_, **__):
        pass

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))


def batches():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(STEPS * 4, 8, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=4)


def trainer_with(plugin=None, **options):
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | options
    return Trainer(
        accelerator="cpu",
        plugins=[plugin] if plugin else None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def fit(module, plugin=None, **options):
    """Train a module; return its parameters."""
    trainer_with(plugin, **options).fit(module, batches())
    return [param.detach() for param in module.parameters()]


def plain(precision="16-mixed"):
    """Return Lightning's plugin for a precision."""
    is_scaled = precision == "16-mixed"
    scaler = torch.amp.GradScaler("cpu", **SCALE) if is_scaled else None
    return PlainPrecision(precision, "cpu", scaler)


def ours(precision="16-mixed"):
    is_scaled = precision == "16-mixed"
    return MixedPrecision(precision, "cpu", **(SCALE if is_scaled else {}))


# Gradients are float16 products; a last bit of theirs may move an Adam update visibly.
assert_close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("precision", "clipping", "accumulated"),
    [
        *(("16-mixed", clipping, 1) for clipping in CLIPPING),
        *(("16-mixed", clipping, 2) for clipping in ("none", "norm")),
        *(("bf16-mixed", clipping, 1) for clipping in CLIPPING),
    ],
)
def test_trainer_trains_as_with_torch(precision, clipping, accumulated):
    options = CLIPPING[clipping] | {"accumulate_grad_batches": accumulated}
    plugins = ours(precision), plain(precision)
    found = fit(Regression(ampfuse.AdamW), plugins[0], **options)
    expected = fit(Regression(torch.optim.AdamW), plugins[1], **options)
    # In bfloat16 the step with an infinite loss is not skipped.
    assert_close(found, expected, equal_nan=precision == "bf16-mixed")
    if precision == "16-mixed":
        assert plugins[0].scaler.get_scale() == plugins[1].scaler.get_scale()
        assert any(record.skipped for record in plugins[0].scaler.history())


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("clipping", CLIPPING)
def test_optimizer_that_unscales_before_needs_no_plugin_of_ours(precision, clipping):
    results = []
    for make, options in ((torch.optim.AdamW, {}), (ampfuse.AdamW, {"unscale": "before"})):
        module = Regression(make, **options)
        results.append((fit(module, plain(precision), **CLIPPING[clipping]), module.seen))
    (expected, torchs_seen), (found, seen) = results
    assert_close(found, expected, equal_nan=True)
    assert seen == pytest.approx(torchs_seen, rel=1e-2, nan_ok=True)


def test_fused_optimizer_of_torch_may_be_clipped():
    for clipping in ("norm", "value"):
        expected = fit(Regression(torch.optim.AdamW), plain(), **CLIPPING[clipping])
        found = fit(Regression(torch.optim.AdamW, fused=True), ours(), **CLIPPING[clipping])
        assert_close(found, expected)


class ClipsAtFirst(Regression):
    def configure_gradient_clipping(self, optimizer, *_, **__):
        if self.global_step < 2:
            self.clip_gradients(optimizer, 1e-3, "norm")


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_limit_is_for_one_step(precision):
    module = ClipsAtFirst(ampfuse.AdamW)
    found = fit(module, ours(precision))
    expected = fit(ClipsAtFirst(torch.optim.AdamW), plain(precision))
    assert_close(found, expected, equal_nan=True)
    assert module.optimizers().optimizer.max_grad_norm is None


def logged(every):
    """Return the steps and metrics that the callback has logged."""
    logger = Records()
    options = {"logger": logger, "log_every_n_steps": every, "callbacks": [ScaleLogger()]}
    fit(Regression(ampfuse.AdamW), ours(), **options)
    return [(step, metrics) for step, metrics in logger.logged if "loss_scale" in metrics]


def test_callback_logs_scale_skips_and_norm_when_lightning_logs():
    assert logged(every=0) == []
    found = logged(every=2)
    assert [step for step, _ in found] == [2, 4, 6, 8]
    assert [metrics["loss_scale"] for _, metrics in found] == [1024.0, 512.0, 512.0, 1024.0]
    assert [metrics["skipped_steps"] for _, metrics in found] == [0, 1, 1, 1]
    assert found[-1][1]["grad_norm"] > 0


def test_callback_without_our_scaler_and_options_without_float16_are_refused():
    with pytest.raises(TypeError, match="ScaleLogger: expected Trainer"):
        fit(Regression(ampfuse.AdamW), callbacks=[ScaleLogger()])
    for plugin in (MixedPrecision, FabricMixedPrecision):
        with pytest.raises(ValueError, match=r"precision: expected '16-mixed' with .*init_scale"):
            plugin("bf16-mixed", "cpu", init_scale=2.0)


def test_run_goes_on_from_a_checkpoint_of_the_trainer(tmp_path):
    def run(epochs, path=None):
        module, plugin = Regression(ampfuse.AdamW), ours()
        trainer = trainer_with(plugin, max_epochs=epochs)
        trainer.fit(module, batches(), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return [*module.parameters()], plugin.scaler.state_dict()

    expected, state = run(2)
    run(1)
    found, resumed = run(2, tmp_path / "1.ckpt")
    assert all(map(torch.equal, found, expected))
    assert resumed == state


def fabric_training(make, plugin, clipping=None):
    fabric = Fabric(accelerator="cpu", plugins=[plugin])
    module = Regression(make)
    model, optimizer = fabric.setup(module.model, make(module.model.parameters(), lr=0.02))
    for index, (inputs, target) in enumerate(batches()):
        loss = (model(inputs) - target).square().mean() * 10
        fabric.backward(loss * float("inf") if index == OVERFLOW else loss)
        if clipping:
            fabric.clip_gradients(model, optimizer, **clipping)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in module.model.parameters()], plugin.scaler.get_scale()


def test_optimizer_inside_fabrics_wrapper_gets_norms_of_backward():
    fabric = Fabric(accelerator="cpu")
    module = Regression(ampfuse.AdamW)
    own = ampfuse.AdamW(module.model.parameters(), max_grad_norm=1.0)
    model, optimizer = fabric.setup(module.model, own)
    norms_in_backward(model, optimizer)
    inputs, target = next(iter(batches()))
    fabric.backward((model(inputs) - target).square().mean())
    optimizer.step()
    assert BackwardNorms.find(own)._records


@pytest.mark.parametrize(
    "clipping",
    [None, {"max_norm": 0.1, "error_if_nonfinite": False}, {"clip_val": 0.02}],
    ids=["none", "norm", "value"],
)
def test_fabric_trains_as_with_torch(clipping):
    torchs = PlainFabricPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", **SCALE))
    expected = fabric_training(torch.optim.AdamW, torchs, clipping)
    found = fabric_training(
        ampfuse.AdamW, FabricMixedPrecision("16-mixed", "cpu", **SCALE), clipping
    )
    assert_close(found[0], expected[0])
    assert found[1] == expected[1] == 1024.0


class TwoOptimizers(LightningModule):
    """Clips the gradients of two optimizers, and then steps both."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        for layer in (self.first, self.second):
            nn.init.zeros_(layer.weight)

    def training_step(self, batch, index):
        optimizers = self.optimizers()
        loss = 100 * (self.first(batch[0]) + self.second(batch[0])).sum()
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, 0.01, "norm")
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        options = {"lr": 1.0, "betas": (0.0, 0.0), "eps": 1.0}
        return [ampfuse.AdamW(layer.parameters(), **options) for layer in (self.first, self.second)]


def test_each_optimizer_keeps_its_limit_until_its_own_step():
    module = TwoOptimizers()
    trainer = trainer_with(ours("bf16-mixed"))
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(1, 4))))
    assert module.second.weight.abs().max() < 0.01
    assert torch.equal(module.first.weight, module.second.weight)
    assert all(one.max_grad_norm is None for one in trainer.optimizers)
