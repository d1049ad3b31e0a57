"""Patched optimizers with parameters that are listed twice, and with sparse gradients."""

import math

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS
from scaler_languages import step_by

USAGE = PARTS["optimizers"].usage
OVERFLOWS = (1, 2, 4)  # indices of the steps, of six, whose gradients are infinite

pytestmark = pytest.mark.usefixtures("patched")


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize(
    ("name", "options", "has_scaler"),
    [
        ("AdamW", {}, False),
        ("AdamW", {}, True),
        ("AdamW", {"fused": True}, True),
        ("SGD", {}, True),
        ("SGD", {"fused": True}, True),
    ],
    ids=str,
)
def test_parameter_listed_twice_in_a_group_steps_as_in_torch(name, has_scaler, options):
    """Tie the weights of two layers and list the parameters of both."""

    def trained():
        torch.manual_seed(0)
        words, scores = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        scores.weight = words.weight
        params = [*words.parameters(), *scores.parameters()]
        optimizer = getattr(torch.optim, name)(params, lr=0.1, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=has_scaler)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(scores(words.weight), torch.arange(5))
            step_by(scaler, optimizer, loss)
        return words.weight.detach()

    ours = trained()
    ampfuse.unpatch()
    torch.testing.assert_close(ours, trained())


def sparse_program(**options):
    """Train an embedding with sparse gradients, and a layer; some steps overflow."""
    torch.manual_seed(0)
    words, scores = torch.nn.Embedding(5, 3, sparse=True), torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(words, scores)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for number in range(6):
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 3, 1])).square().mean()
        step_by(scaler, optimizer, loss * (math.inf if number in OVERFLOWS else 1.0))
    return model, optimizer


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "nesterov": True}, {"foreach": True}], ids=str
)
def test_parameter_of_sgd_with_a_sparse_gradient_is_stepped_by_torch(options, caplog):
    ours, optimizer = sparse_program(**options)
    assert isinstance(optimizer, ampfuse.SGD)
    assert USAGE.uses == 6
    reason = "a parameter's step in torch.optim.SGD is left to torch: its gradient is sparse"
    assert [record.getMessage() for record in caplog.records].count(reason) == 1
    assert all(param.grad is not None for param in ours.parameters())
    ampfuse.unpatch()
    plain, _ = sparse_program(**options)
    for p, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, other)


def test_momentum_of_sparse_gradients_is_loaded_as_torch_loads_it():
    def resumed():
        model, optimizer = sparse_program(momentum=0.9)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        model(torch.tensor([1])).sum().backward()
        optimizer.step()
        return [param.detach() for param in model.parameters()]

    ours = resumed()
    ampfuse.unpatch()
    torch.testing.assert_close(ours, resumed())


@pytest.mark.parametrize("options", [{"fused": True}, {"weight_decay": 0.1}], ids=str)
def test_sparse_gradient_that_torchs_sgd_refuses_is_refused(options):
    with pytest.raises(RuntimeError, match="SGD with fused=True, with weight decay or in torch"):
        sparse_program(**options)
    ampfuse.unpatch()
    with pytest.raises(RuntimeError, match="sparse"):
        sparse_program(**options)
