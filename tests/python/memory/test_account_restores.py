"""An account leaves model, optimizers and random numbers as they were."""

import copy
import random

import ampfuse
import numpy
import pytest
import torch
from account_models import ROWS, WIDTH, stepper, two_layers
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


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "make",
    [ampfuse.AdamW, torch.optim.AdamW, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)],
    ids=["ampfuse", "torch", "SGD"],
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


def test_gradients_of_one_element_and_all_random_numbers_are_restored():
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(ROWS, WIDTH)).sum().backward()

    def step():
        random.random(), numpy.random.rand()
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(ROWS, WIDTH)).sum().backward()
        optimizer.step()

    random.seed(1), numpy.random.seed(1)
    numbers = random.random(), numpy.random.rand()
    random.seed(1), numpy.random.seed(1)
    account(model, optimizer, step)
    assert model.bias.grad.tolist() == [ROWS]
    assert (random.random(), numpy.random.rand()) == numbers


def test_gradients_and_options_are_restored():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    gradient = model[0].weight.grad = torch.ones(WIDTH, WIDTH)
    take = stepper(model, optimizer)

    def step():
        take()
        schedule.step()

    account(model, optimizer, step)
    assert model[0].weight.grad is gradient
    assert torch.equal(gradient, torch.ones(WIDTH, WIDTH))
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_failed_step_raises_its_error_and_everything_is_restored():
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        stepper(model, optimizer)()
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


def test_nothing_of_the_dry_run_stays_in_the_model_or_in_other_optimizers():
    model, other = Restless(), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    others = torch.optim.AdamW(other.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def step():
        other(model(torch.ones(4, WIDTH))).sum().backward()
        optimizer.step()
        others.step()
        optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    account(model, optimizer, step)
    assert model.table is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert not others.state
    assert all(param.grad is None for param in other.parameters())
    assert optimizer.param_groups[0]["lr"] == torch.tensor(1e-3)
    assert len(optimizer.param_groups) == 1


def test_parameters_that_a_step_freezes_are_trained_again():
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters())
    step = stepper(model, optimizer)

    def freeze():
        step()
        next(model.parameters()).requires_grad_(False)

    account(model, optimizer, freeze, device="cpu")
    assert all(param.requires_grad for param in model.parameters())


@pytest.mark.parametrize("steps_before", [0, 1])
def test_optimizer_may_keep_other_values_beside_its_states(steps_before):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["calls"] = 1
    step = stepper(model, optimizer)
    for _ in range(steps_before):
        step()
    assert account(model, optimizer, step, device="cpu").peak > 0
    assert optimizer.state["calls"] == 1


def test_distributions_of_zeros_are_accepted_in_a_dry_run():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        mean = model(torch.ones(2, 4))
        torch.distributions.Normal(mean, torch.ones(2, 4)).rsample().sum().backward()
        optimizer.step()

    assert account(model, optimizer, step, device="cpu").peak > 0


def test_buffers_must_be_initialized():
    model = nn.LazyBatchNorm1d(affine=False)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="expected initialized parameters"):
        account(model, optimizer, lambda: None, device="cpu")
