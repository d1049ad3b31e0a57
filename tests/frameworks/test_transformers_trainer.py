"""Transformers' Trainer with our optimizer and scaler, against torch's AdamW."""

import ampfuse
import pytest
import torch
from ampfuse.integrations.transformers import use_ampfuse
from small_llama import llama, texts
from transformers import Trainer, TrainerCallback, TrainingArguments

STEPS, OVERFLOW = 8, 3
SCALE = {"init_scale": 1024.0, "growth_interval": 4}


class OverflowingTrainer(Trainer):
    """A trainer whose loss overflows once."""

    losses = 0

    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses += 1
        return loss * float("inf") if self.losses == OVERFLOW + 1 else loss


class Rates(TrainerCallback):
    """Records the learning rates."""

    def __init__(self):
        self.rates = []

    def on_step_end(self, args, state, control, **kwargs):
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])


def trainer(folder, accumulated=1, **options):
    data = texts(STEPS * 2 * accumulated, 16)
    options = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulated,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "optim": "adamw_torch",
    } | options
    arguments = TrainingArguments(**options)
    return OverflowingTrainer(llama(), arguments, train_dataset=data, callbacks=[Rates()])


def rates(one):
    (found,) = (each for each in one.callback_handler.callbacks if isinstance(each, Rates))
    return found.rates


@pytest.mark.parametrize(("accumulated", "clip"), [(1, 1.0), (1, 0.0), (2, 1.0)])
def test_float16_training_skips_as_with_torch(tmp_path, accumulated, clip):
    torchs = trainer(tmp_path, accumulated, fp16=True, max_grad_norm=clip)
    torchs.accelerator.scaler = torch.amp.GradScaler("cpu", **SCALE)
    torchs.accelerator.native_amp = True
    torchs.train()
    ours = use_ampfuse(trainer(tmp_path, accumulated, fp16=True, max_grad_norm=clip), scaler=SCALE)
    ours.train()
    assert type(ours.optimizer.optimizer) is ampfuse.AdamW
    assert rates(ours) == rates(torchs)
    assert len(set(rates(ours))) == STEPS - 1  # the rate stood still once
    assert ours.accelerator.scaler.get_scale() == torchs.accelerator.scaler.get_scale()
    parameters = [list(trained.model.parameters()) for trained in (ours, torchs)]
    torch.testing.assert_close(*parameters, rtol=1e-3, atol=1e-3)


def logs_of(trained):
    return [entry for entry in trained.state.log_history if "loss" in entry]


def test_logs_have_scale_and_skipped_steps(tmp_path):
    ours = use_ampfuse(trainer(tmp_path, fp16=True), scaler=SCALE)
    ours.train()
    logs = logs_of(ours)
    assert [entry["loss_scale"] for entry in logs] == [1024.0, 512.0, 512.0, 1024.0]
    assert [entry["skipped_steps"] for entry in logs] == [0, 1, 1, 1]


def test_arguments_reach_the_optimizer(tmp_path):
    ours = use_ampfuse(trainer(tmp_path, adam_beta1=0.8, bf16=True), state_dtype=torch.bfloat16)
    ours.train()
    optimizer = ours.optimizer.optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.999)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


def test_trials_of_a_search_have_their_own_rate_and_scaler(tmp_path):
    ours = use_ampfuse(trainer(tmp_path, fp16=True), scaler=SCALE)
    first = ours.accelerator.scaler
    ours.args.learning_rate = 0.5  # what a trial does
    ours.create_accelerator_and_postprocess()
    ours.train()
    assert ours.optimizer.param_groups[0]["initial_lr"] == 0.5
    assert type(ours.accelerator.scaler) is ampfuse.GradScaler
    assert ours.accelerator.scaler is not first
    assert logs_of(ours)[-1]["loss_scale"] == ours.accelerator.scaler.get_scale()


def test_trainers_and_arguments_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"which ampfuse\.AdamW replaces, got .*adafactor"):
        use_ampfuse(trainer(tmp_path, optim="adafactor"))
    with pytest.raises(TypeError, match=r"expected a transformers\.Trainer, got Linear"):
        use_ampfuse(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match="growth_interval"):
        use_ampfuse(trainer(tmp_path), growth_interval=4)
    with pytest.raises(ValueError, match="without an optimizer of its own"):
        use_ampfuse(use_ampfuse(trainer(tmp_path)))


def test_a_refused_call_changes_nothing(tmp_path):
    ours = trainer(tmp_path, fp16=True)
    with pytest.raises(TypeError, match="grow"):
        use_ampfuse(ours, scaler={"grow": 5})
    ours.create_optimizer()
    assert type(ours.optimizer) is torch.optim.AdamW
    plain = trainer(tmp_path, bf16=True)
    with pytest.raises(ValueError, match=r"scaler: expected TrainingArguments\(fp16=True\)"):
        use_ampfuse(plain, scaler=SCALE)
    use_ampfuse(plain)


def test_a_disabled_scaler_logs_nothing(tmp_path):
    ours = use_ampfuse(trainer(tmp_path, fp16=True), scaler={"enabled": False})
    ours.train()
    assert not any("loss_scale" in entry for entry in ours.state.log_history)
