"""Arguments, batches, and changes since it was made, which ampfuse.GraphedStep refuses."""

import re

import ampfuse
import pytest
import torch
from graphed_models import Side, batch
from torch import nn
from torch.nn import functional


def made(side, **arguments):
    given = {
        "model": side.model,
        "loss_fn": functional.cross_entropy,
        "optimizer": side.optimizer,
        "scaler": side.scaler,
        "sample": batch(side.device),
        **arguments,
    }
    return ampfuse.GraphedStep(**given)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": functional.cross_entropy}, TypeError, "model: expected torch.nn.Module, got"),
        ({"autocast": True}, TypeError, "autocast: expected a torch.dtype or None, got builtins.b"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm: expected None or at least 0, got -1"),
        ({"max_grad_norm": True}, TypeError, "max_grad_norm: expected None or a number, got bool"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm: expected None or a number, got str"),
        ({"max_grad_norm": torch.ones(())}, TypeError, "max_grad_norm: .* a number, got Tensor"),
        ({"sample": ()}, ValueError, "got nothing"),
        ({"sample": (torch.ones(8, 6), 3)}, TypeError, r"sample\[1\]: expected a tensor"),
        ({"sample": (torch.ones(8, 6, device="meta"),)}, ValueError, "got meta"),
        ({"sample": torch.ones(8, 6)}, TypeError, "expected a sequence of tensors, got a tensor"),
        ({"micro_batches": 0}, ValueError, "micro_batches"),
        ({"micro_batches": 3}, ValueError, "micro_batches"),  # there are 8 rows
    ],
)
def test_invalid_arguments_are_refused_by_name(device, arguments, error, words):
    with pytest.raises(error, match=words):
        made(Side(device), **arguments)


def test_optimizers_and_scalers_of_torch_are_refused(device):
    side = Side(device)
    with pytest.raises(
        TypeError, match=r"expected ampfuse.Adam, AdamW or SGD, got torch.optim.sgd.SGD"
    ):
        made(side, optimizer=torch.optim.SGD(side.model.parameters()))
    with pytest.raises(TypeError, match=r"scaler: expected ampfuse.GradScaler, got torch.amp"):
        made(side, scaler=torch.amp.GradScaler(device.type))


def test_an_optimizer_of_another_model_is_refused(device):
    side = Side(device)
    side.model = Side(device).model  # a second model with parameters of its own
    with pytest.raises(RuntimeError, match="none of its parameters got a gradient"):
        made(side)(*batch(device))


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda *_: {"loss": 1}, "got builtins.dict"),
        (lambda logits, _: logits.sum(1), r"got shape \(8,\)"),
    ],
)
def test_losses_that_are_not_one_number_are_refused(device, loss_fn, got):
    with pytest.raises(TypeError, match=f"loss_fn: expected it to return one number .* {got}"):
        made(Side(device), loss_fn=loss_fn)(*batch(device))


WRONG_BATCHES = {
    "few": (lambda x, y: (x,), TypeError, "expected 2 tensors, as in sample, got 1"),
    "shape": (lambda x, y: (x[:4], y), ValueError, r"batch\[0\]: expected torch.float32 of shape"),
    "dtype": (lambda x, y: (x, y.int()), ValueError, r"batch\[1\]: expected torch.int64"),
    "no tensor": (lambda x, y: (x, None), TypeError, r"batch\[1\]: expected a tensor, got builtin"),
    "requires grad": (
        lambda x, y: (x.requires_grad_(), y),
        ValueError,
        r"batch\[0\]: expected .* does not require grad",
    ),
}


@pytest.mark.parametrize("kind", WRONG_BATCHES)
def test_batches_unlike_the_sample_are_refused(device, kind, monkeypatch):
    side = Side(device, monkeypatch=monkeypatch)
    step = side.graphed()
    wrong, error, words = WRONG_BATCHES[kind]
    before = side.model.state_dict()["layers.0.weight"].clone()
    with pytest.raises(error, match=words):
        step(*wrong(*batch(device)))
    assert torch.equal(side.model.layers[0].weight, before)


def move_first_parameter(side, step):
    first = next(side.model.parameters())
    first.data = first.data.clone()


def add_group(side, step):
    side.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, device=side.device))]})


# Functions that change something, and the name that the error gives it.
CHANGES = [
    (lambda side, step: side.optimizer.param_groups[0].update(weight_decay=0.5), "weight_decay"),
    (lambda side, step: side.optimizer.param_groups[0].update(betas=(0.5, 0.5)), "betas"),
    (lambda side, step: setattr(side.optimizer, "max_grad_norm", 2.0), "optimizer.max_grad_norm"),
    (add_group, "parameters"),
    (lambda side, step: next(side.model.parameters()).requires_grad_(False), "parameters"),
    (move_first_parameter, "parameters"),
    (lambda side, step: side.model.layers[1].eval(), "model.training"),
    (lambda side, step: side.scaler.set_growth_interval(7), "scaler.growth_interval"),
    (lambda side, step: side.scaler.set_growth_factor(4.0), "scaler.growth_factor"),
    (lambda side, step: side.scaler.set_backoff_factor(0.25), "scaler.backoff_factor"),
    (lambda side, step: setattr(step, "model", nn.Linear(6, 5)), "step.model"),
    (lambda side, step: setattr(step, "loss_fn", functional.nll_loss), "step.loss_fn"),
    (lambda side, step: setattr(step, "autocast", torch.bfloat16), "step.autocast"),
    (lambda side, step: setattr(step, "max_grad_norm", 1.0), "step.max_grad_norm"),
]


@pytest.mark.parametrize(("change", "name"), CHANGES)
def test_step_refuses_settings_that_changed_since_it_was_made(device, change, name):
    side = Side(device)
    step = made(side)
    change(side, step)
    of_group = " of group 0" if name in ("weight_decay", "betas") else ""
    words = f"changed since the step was made: {re.escape(name + of_group)}"
    with pytest.raises(RuntimeError, match=rf"{words}(, .*)?; .*make a new"):
        step(*batch(device))


def test_errors_about_changed_settings_suggest_a_remedy(device):
    side = Side(device)
    step = made(side)
    side.model.eval()
    with pytest.raises(
        RuntimeError, match=r"changed .*: model.training; .*call model.train\(\), or make a new"
    ):
        step(*batch(device))


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "betas"), ({"make": ampfuse.SGD, "momentum": 0.9}, "momentum")],
    ids=["AdamW", "SGD"],
)
def test_schedulers_that_cycle_momentum_are_refused_with_a_remedy(device, options, name):
    side = Side(device, **options)
    step = made(side)
    torch.optim.lr_scheduler.OneCycleLR(side.optimizer, 0.1, total_steps=10)
    words = rf"changed .*: {name} of group 0; pass cycle_momentum=False"
    with pytest.raises(RuntimeError, match=words):
        step(*batch(device))


def test_step_compares_options_of_groups_with_those_of_the_constructor(device):
    side = Side(device, write_back_grads=True)
    step = made(side)
    side.optimizer.param_groups[0]["write_back_grads"] = True
    step(*batch(device))
    side.optimizer.param_groups[0]["write_back_grads"] = False
    with pytest.raises(RuntimeError, match=r"changed since .* write_back_grads of group 0"):
        step(*batch(device))


def test_betas_may_be_loaded_as_a_list(device):
    side = Side(device)
    step = made(side)
    saved = side.optimizer.state_dict()
    saved["param_groups"][0]["betas"] = list(saved["param_groups"][0]["betas"])
    side.optimizer.load_state_dict(saved)
    step(*batch(device))
