"""An account leaves model, optimizers and random numbers as they were."""

import copy
import random

import ampfuse
import numpy
import pytest
import torch
from account_models import ROWS, WIDTH, loss_of_batch, sgd, stepper, two_layers
from ampfuse.memory import account
from torch import nn
from torch.nn import functional


class WithCounters(nn.Module):
    """A model with all kinds of tensors that a step changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, batch):
        return self.norm(self.layer(batch)) * self.factor


# An optimizer's first step makes its state.
@pytest.mark.parametrize(
    ("make", "steps_before"),
    [
        (ampfuse.AdamW, 0),
        (ampfuse.AdamW, 2),
        (torch.optim.AdamW, 2),
        (lambda params: torch.optim.SGD(params, 0.1, momentum=0.9), 2),
    ],
    ids=["ampfuse before its first step", "ampfuse", "torch", "SGD"],
)
def test_training_goes_on_as_without_an_account(make, steps_before):
    torch.manual_seed(0)
    model = WithCounters()
    optimizer = make(model.parameters())
    twin = copy.deepcopy(model)
    twins = make(twin.parameters())
    batch = torch.randn(ROWS, WIDTH)

    def step(model, optimizer):
        functional.dropout(model(batch), 0.1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for counted in (False, True):
        for trained in ((model, optimizer), (twin, twins)):
            torch.manual_seed(1)
            for _ in range(2 if counted else steps_before):
                step(*trained)
        if not counted:
            before = torch.get_rng_state()
            account(model, optimizer, lambda: step(model, optimizer))
            assert torch.equal(torch.get_rng_state(), before)
            assert len(optimizer.state) == len(twins.state)
    for tensor, other in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_options_and_random_numbers_are_restored(set_to_none):
    model = nn.Linear(WIDTH, 1)
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    gradients = [param.grad for param in model.parameters()]
    values = [gradient.clone() for gradient in gradients]

    def seeded():
        random.seed(1)
        numpy.random.seed(1)

    def drawn():
        return random.random(), numpy.random.rand()

    def step():
        drawn()
        optimizer.zero_grad(set_to_none)
        model(torch.ones(ROWS, WIDTH)).square().sum().backward()
        optimizer.step()
        schedule.step()

    seeded()
    numbers = drawn()
    seeded()
    account(model, optimizer, step)
    assert drawn() == numbers
    assert optimizer.param_groups[0]["lr"] == 0.1
    for param, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert param.grad is gradient
        assert torch.equal(gradient, value)  # also that of the bias, which is one number


def test_failed_step_raises_its_error_and_everything_is_restored():
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        stepper(optimizer, loss_of_batch(model))()
        raise RuntimeError("out of data")

    with pytest.raises(RuntimeError, match="out of data"):
        account(model, optimizer, step)
    assert not optimizer.state
    assert torch.ones(300, 300).exp().sum() > 0  # operators compute again


class Restless(nn.Module):
    """A model that changes what it refers to in each call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = None
        self.register_buffer("center", torch.ones(WIDTH))
        self.register_buffer("positions", torch.arange(3).expand(4, 3))

    def forward(self, batch):
        if self.table is None:
            self.table = torch.linspace(0, 1, WIDTH).cos()
        self.center = 0.9 * self.center + 0.1
        self.layer.weight.data = 0.5 * self.layer.weight.data
        torch.mul(self.layer.bias.detach(), 0.5, out=self.layer.bias.detach())
        return self.layer(batch) * self.table + self.center


@pytest.mark.parametrize("steps_before", [0, 1])
def test_nothing_of_the_dry_run_stays_in_the_model_or_in_optimizers(steps_before):
    model, other = Restless(), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    optimizer.state["calls"] = 1  # an optimizer may keep other values beside its states
    others = torch.optim.AdamW(other.parameters())
    for _ in range(steps_before):
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
        model.table = None
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step():
        other(model(torch.ones(4, WIDTH))).sum().backward()
        optimizer.step()
        others.step()
        optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        model.layer.bias.requires_grad_(False)

    account(model, optimizer, step)
    assert model.table is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(param.requires_grad for param in model.parameters())
    assert optimizer.state["calls"] == 1
    assert not others.state
    assert all(param.grad is None for param in other.parameters())
    assert optimizer.param_groups[0]["lr"] == torch.tensor(1e-3)
    assert len(optimizer.param_groups) == 1
