"""Arguments that ampfuse.GraphedStep accepts or refuses, and its error messages."""

import ampfuse
import pytest
import torch
from graphed_models import Side, batch
from torch import nn
from torch.nn import functional


def made(side, device, model=None, loss_fn=functional.cross_entropy, **options):
    return ampfuse.GraphedStep(
        model or side.model, loss_fn, side.optimizer, side.scaler, batch(device), **options
    )


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"model": functional.cross_entropy}, TypeError, "model: expected torch.nn.Module, got"),
        ({"autocast": True}, TypeError, "autocast: expected a torch.dtype or None, got builtins.b"),
        ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm: expected None or at least 0, got -1"),
        ({"max_grad_norm": True}, TypeError, "max_grad_norm: expected None or a number, got bool"),
        ({"max_grad_norm": "1"}, TypeError, "max_grad_norm: expected None or a number, got str"),
        ({"max_grad_norm": torch.ones(())}, TypeError, "max_grad_norm: .* a number, got Tensor"),
    ],
)
def test_invalid_arguments_are_refused_by_name(device, options, error, words):
    with pytest.raises(error, match=words):
        made(Side(device), device, **options)


def test_an_optimizer_of_another_model_is_refused(device):
    side = Side(device)
    side.model = Side(device).model  # a second model with parameters of its own
    with pytest.raises(RuntimeError, match="none of its parameters got a gradient"):
        made(side, device)(*batch(device))


def test_parameters_need_not_belong_to_the_model(device):
    side = Side(device)
    side.model.requires_grad_(False)
    shift = nn.Parameter(torch.zeros(5, device=device))
    side.optimizer = ampfuse.AdamW([shift], max_grad_norm=1.0)
    step = made(
        side,
        device,
        loss_fn=lambda logits, target: functional.cross_entropy(logits + shift, target),
    )
    for _ in range(2):
        step(*batch(device))
    assert shift.abs().max() > 0


class Alternating(nn.Module):
    """A model whose second layer gets gradients only in every other call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(6, 5)
        self.times = 0

    def forward(self, images):
        self.times += 1
        return self.first(images) if self.times % 2 == 0 else self.second(images)


@pytest.mark.parametrize("options", [{"enabled": False}, {"allow_no_grads": True}])
def test_some_steps_may_have_no_gradients(options):
    cpu = torch.device("cpu")  # a CUDA graph replays the same layer each time
    side = Side(cpu)
    side.model = Alternating()
    side.optimizer = ampfuse.AdamW(side.model.second.parameters())
    side.scaler = ampfuse.GradScaler("cpu", **options)
    step = made(side, cpu)
    losses = [step(*batch(cpu)).item() for _ in range(4)]
    assert losses[0] > losses[2]
    assert losses[1] == losses[3]


@pytest.mark.parametrize(
    ("loss_fn", "got"),
    [
        (lambda *_: {"loss": 1}, "got builtins.dict"),
        (lambda logits, _: logits.sum(1), r"got shape \(8,\)"),
    ],
)
def test_losses_that_are_not_one_number_are_refused(device, loss_fn, got):
    with pytest.raises(TypeError, match=f"loss_fn: expected it to return one number .* {got}"):
        made(Side(device), device, loss_fn=loss_fn)(*batch(device))


def test_batches_with_an_element_that_is_no_tensor_are_refused(device):
    step = made(Side(device), device)
    with pytest.raises(TypeError, match=r"batch\[1\]: expected a tensor, got builtins.NoneType"):
        step(batch(device)[0], None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", nn.Linear(6, 5)),
        ("loss_fn", functional.nll_loss),
        ("autocast", torch.bfloat16),
        ("max_grad_norm", 1.0),
    ],
)
def test_arguments_may_not_be_assigned_after_the_step_is_made(device, name, value):
    step = made(Side(device), device)
    setattr(step, name, value)
    with pytest.raises(RuntimeError, match=rf"changed since the step was made: step\.{name}; make"):
        step(*batch(device))


def test_betas_may_be_loaded_as_a_list(device):
    side = Side(device)
    step = made(side, device)
    saved = side.optimizer.state_dict()
    saved["param_groups"][0]["betas"] = list(saved["param_groups"][0]["betas"])
    side.optimizer.load_state_dict(saved)

    step(*batch(device))


def test_errors_about_changed_settings_suggest_a_remedy(device):
    side = Side(device)
    step = made(side, device)
    side.model.eval()
    with pytest.raises(
        RuntimeError, match=r"changed .*: model.training; .*call model.train\(\), or make a new"
    ):
        step(*batch(device))
    side.model.train()
    torch.optim.lr_scheduler.OneCycleLR(side.optimizer, 0.1, total_steps=10)
    with pytest.raises(
        RuntimeError, match=r"changed .*: betas of group 0; pass cycle_momentum=False"
    ):
        step(*batch(device))
