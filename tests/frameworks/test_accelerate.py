"""Accelerate with our optimizer and scaler, against torch's AdamW, which is not fused."""

import ampfuse
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from ampfuse.integrations import ScaleMetrics
from ampfuse.integrations.accelerate import use_scaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, OVERFLOW = 8, 3
SCALE = {"init_scale": 1024.0, "growth_interval": 4}


def reset():
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture(autouse=True)
def no_accelerator_before():
    """Let each test make an Accelerator of its own; they share their state otherwise."""
    reset()


def made(scaler="ours", accumulated=1, **options):
    """Return an accelerator that trains in float16 on the CPU."""
    accelerator = Accelerator(
        mixed_precision="fp16", cpu=True, gradient_accumulation_steps=accumulated, **options
    )
    if scaler == "ours":
        use_scaler(accelerator, **SCALE)
    else:
        accelerator.scaler = torch.amp.GradScaler("cpu", **SCALE)
        accelerator.native_amp = True
    return accelerator


def train(accelerator, make, clip=None, epochs=1, **options):
    """Train with one overflow; return parameters, skipped steps and learning rates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = make(model.parameters(), lr=0.02, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inputs = torch.randn(STEPS * 4, 8)
    batches = DataLoader(TensorDataset(inputs, inputs[:, :1].sin()), batch_size=4)
    model, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, batches, scheduler)
    skipped, rates = [], []
    for epoch in range(epochs):
        for index, (given, target) in enumerate(batches):
            with accelerator.accumulate(model):
                loss = (model(given).float() - target).square().mean() * 10
                overflows = epoch == 0 and index == OVERFLOW
                accelerator.backward(loss * float("inf") if overflows else loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                skipped.append(accelerator.optimizer_step_was_skipped)
                rates.append(scheduler.get_last_lr()[0])
    return [param.detach() for param in model.parameters()], skipped, rates


@pytest.mark.parametrize(
    ("scaler", "clip", "accumulated"),
    [
        ("ours", None, 1),
        ("ours", 0.1, 1),
        ("ours", 0.1, 2),
        ("torch's", None, 1),
        ("torch's", 0.1, 2),
    ],
)
def test_skips_rates_and_weights_are_those_of_torch(scaler, clip, accumulated):
    accelerator = made("torch's", accumulated)
    expected, skipped, rates = train(accelerator, torch.optim.AdamW, clip)
    scale = accelerator.scaler.get_scale()
    reset()
    accelerator = made(scaler, accumulated)
    found = train(accelerator, ampfuse.AdamW, clip)
    assert found[1:] == (skipped, rates)
    assert any(skipped)
    assert rates[OVERFLOW] == rates[OVERFLOW - 1]
    assert accelerator.scaler.get_scale() == scale
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


def test_optimizer_may_clip_in_its_step():
    expected, skipped, rates = train(made(), ampfuse.AdamW, clip=0.1)
    reset()
    found = train(made(), ampfuse.AdamW, max_grad_norm=0.1)
    assert found[1:] == (skipped, rates)
    torch.testing.assert_close(found[0], expected)


def test_weights_in_float16_need_a_scaler_that_allows_them():
    class Half(ampfuse.AdamW):
        """An optimizer that converts its parameters to float16 first."""

        def __init__(self, params, **options):
            params = list(params)
            for param in params:
                param.data = param.data.half()
            super().__init__(params, **options)

    with pytest.raises(ValueError, match="allow_fp16_grads=True"):
        train(made(), Half)
    reset()
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    use_scaler(accelerator, **SCALE, allow_fp16_grads=True)
    params, skipped, _ = train(accelerator, Half)
    assert [index for index, was in enumerate(skipped) if was] == [OVERFLOW]
    assert all(param.dtype == torch.float16 for param in params)


def test_metrics_for_the_logger_count_skipped_steps():
    accelerator = made()
    metrics = ScaleMetrics(accelerator.scaler)
    train(accelerator, ampfuse.AdamW)
    read = metrics.read()
    assert (read["loss_scale"], read["skipped_steps"]) == (1024.0, 1)
    assert read["grad_norm"] > 0
    assert metrics.read()["skipped_steps"] == 1


def test_scaler_without_a_history_is_refused_and_a_disabled_one_has_no_metrics():
    with pytest.raises(ValueError, match="scaler: expected one made with history="):
        ScaleMetrics(ampfuse.GradScaler("cpu"))
    with pytest.raises(TypeError, match=r"scaler: expected ampfuse\.GradScaler, got NoneType"):
        ScaleMetrics(None)
    assert ScaleMetrics(ampfuse.GradScaler("cpu", enabled=False)).read() == {}


def test_state_is_saved_and_loaded(tmp_path):
    def state(accelerator):
        optimizer = accelerator._optimizers[0].optimizer
        return optimizer.state_dict(), accelerator.scaler.state_dict()

    accelerator = made()
    train(accelerator, ampfuse.AdamW)
    accelerator.save_state(tmp_path)
    expected = state(accelerator)
    accelerator._optimizers[0].optimizer.param_groups[0]["lr"] = 7.0
    accelerator.scaler.update(2.0)
    accelerator.load_state(tmp_path)
    found = state(accelerator)
    assert found[1] == expected[1]
    assert found[0]["param_groups"] == expected[0]["param_groups"]


def test_an_accelerator_that_needs_no_scaler_or_is_prepared_is_refused():
    with pytest.raises(ValueError, match=r'accelerator: expected .*mixed_precision="fp16"'):
        use_scaler(Accelerator(cpu=True))
    reset()
    accelerator = made()
    accelerator.prepare(ampfuse.AdamW([nn.Parameter(torch.ones(1))]))
    with pytest.raises(RuntimeError, match=r"before accelerator\.prepare"):
        use_scaler(accelerator)
