"""Mistakes that a program repeats in each step, such as gradients that it never resets."""

import inspect
import sys
import types
from collections import Counter
from contextlib import ExitStack
from functools import partial

import ampfuse
import pytest
import torch
from ampfuse.patching import losses, patch, unpatch
from ampfuse.tools.diagnosis.advice import explain_habits
from ampfuse.tools.diagnosis.clock import StepClock
from ampfuse.tools.diagnosis.habits import Habits, WideLogits
from torch import nn
from torch.nn import functional


@pytest.fixture
def habits():
    with ExitStack() as exits:
        made = Habits()
        StepClock(exits, made)
        yield made


INPUTS = torch.ones(2, 4)


def train(reset, *, parts=1, steps=12, model=None, inputs=INPUTS):
    model = nn.Linear(4, 4) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for _ in range(parts):
            model(inputs).sum().backward()
        optimizer.step()
        reset(model, optimizer)


def delete(model, optimizer):
    for param in model.parameters():
        param.grad = None


def keep(model, optimizer):
    pass


RESETS = {
    "set to none": lambda model, optimizer: optimizer.zero_grad(),
    "set to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "set to zero by the model": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "deleted": delete,
    "zeroed": lambda model, optimizer: [param.grad.zero_() for param in model.parameters()],
    "data zeroed": lambda model, optimizer: [p.grad.data.zero_() for p in model.parameters()],
    "kept": keep,
}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("reset", RESETS)
def test_gradients_are_reported_if_they_are_never_reset(habits, reset, parts):
    train(RESETS[reset], parts=parts)
    assert habits.keeps_gradients == (reset == "kept")


def test_gradients_that_another_loss_adds_to_before_they_are_reset_are_not_reported(habits):
    critic, generator = nn.Linear(4, 1), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in (critic, generator)]
    for _ in range(12):
        optimizers[0].zero_grad(set_to_none=False)
        critic(torch.ones(2, 4)).sum().backward()
        optimizers[0].step()
        optimizers[1].zero_grad(set_to_none=False)
        critic(generator(torch.ones(2, 4))).sum().backward()  # also into the critic's gradients
        optimizers[1].step()
    assert not habits.keeps_gradients


def test_backward_in_a_closure_is_not_reported(habits):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 4)) - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(12):
        optimizer.step(closure)
    assert not habits.keeps_gradients


def test_steps_without_backward_are_not_reported(habits):
    model = nn.Linear(4, 4)
    model.weight.grad = torch.ones(4, 4)
    train(keep, parts=0, model=model)
    assert not habits.keeps_gradients


@pytest.mark.parametrize(("resets_in_step", "steps"), [(False, 12), (False, 4), (True, 12)])
def test_optimizer_without_any_gradient_gets_a_hint(habits, resets_in_step, steps):
    model, copied = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if resets_in_step:
        optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.zero_grad())
    for _ in range(steps):
        (model if resets_in_step else copied)(INPUTS).sum().backward()
        optimizer.step()
    found = [hint for hint in explain_habits(habits, steps) if "without any gradient" in hint]
    assert len(found) == (steps == 12 and not resets_in_step)
    assert not found or found[0].startswith("SGD took its first 12 steps without any gradient: do")


def test_sparse_gradients_are_left_alone(habits):
    train(keep, model=nn.Embedding(4, 2, sparse=True), inputs=torch.tensor([1]))
    assert not habits.keeps_gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("make", "has_masters"),
    [
        (torch.optim.SGD, False),
        (torch.optim.AdamW, False),
        (ampfuse.AdamW, True),
        (partial(ampfuse.Mastered, torch.optim.Adagrad), True),
    ],
)
def test_16_bit_weights_without_masters_get_a_hint(habits, make, has_masters, dtype):
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    with ampfuse.patched():
        optimizer = make([param])
    param.sum().backward()
    optimizer.step()
    found = [hint for hint in explain_habits(habits, 1) if "no float32 masters" in hint]
    assert len(found) == (dtype == torch.bfloat16 and not has_masters)
    assert not found or "less than 0.20 % of a weight" in found[0]
    assert not found or "ampfuse.Mastered for other optimizers" in found[0]


def test_anomaly_checks_are_counted(habits):
    train(delete, steps=3)
    with torch.autograd.set_detect_anomaly(True):
        train(delete, steps=4)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        with torch.autograd.detect_anomaly(check_nan=False):  # as it is mostly used
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert habits.anomaly_checks == 4 + 3


def test_anomaly_checks_are_counted_although_gradients_are_kept(habits):
    with torch.autograd.set_detect_anomaly(True):
        train(keep, steps=15)
    assert habits.keeps_gradients
    assert habits.anomaly_checks == 15


def test_compilations_after_the_first_steps_are_counted(habits, monkeypatch):
    graphs = Counter()
    dynamo = types.SimpleNamespace(counters={"stats": graphs})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    compiled = iter([1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0])

    def reset(model, optimizer):
        optimizer.zero_grad()
        graphs["unique_graphs"] += next(compiled)

    train(reset)
    assert habits.compilations == 3


@pytest.fixture
def logits(monkeypatch):
    found = WideLogits()
    patch("cross_entropy")
    monkeypatch.setattr(losses.USAGE, "on_input", found)
    yield found
    unpatch()


def loss_of(logits):
    target = torch.zeros(logits.shape[0], dtype=torch.long)
    return functional.cross_entropy(logits, target)


LINE = f"test_habits.py:{inspect.getsourcelines(loss_of)[1] + 2}"
VIEWS = {
    "none": lambda logits: logits.float()[:, 0],
    "view": lambda logits: logits.float().view(-1, 6),
    "flatten": lambda logits: logits.float().flatten(0, 1),
    "shifted": lambda logits: logits.float()[..., :-1, :].contiguous().view(-1, 6),
}


@pytest.mark.parametrize(
    ("view", "dtype"), [*((view, torch.bfloat16) for view in VIEWS), ("none", torch.float16)]
)
def test_conversion_of_logits_is_noticed_also_before_a_view(logits, view, dtype):
    narrow = torch.zeros(4, 2, 6, dtype=dtype, requires_grad=True).mul(1)
    loss_of(VIEWS[view](narrow))
    assert logits.dtype == dtype
    assert logits.bytes == VIEWS[view](narrow).nbytes
    assert logits.place.where == LINE


def test_largest_conversion_of_logits_is_kept(logits):
    for rows in (4, 8, 2):
        loss_of(torch.zeros(rows, 6, dtype=torch.bfloat16, requires_grad=True).float())
    assert logits.bytes == 8 * 6 * 4


def test_logits_as_they_were_computed_are_not_reported(logits):
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.zeros(6, 6, dtype=dtype, requires_grad=True)
        loss_of(weight @ weight)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(torch.zeros(6, 6, requires_grad=True) @ torch.zeros(6, 6))
    assert logits.bytes == 0


def test_other_conversions_of_logits_are_not_reported(logits):
    loss_of(torch.zeros(4, 6, dtype=torch.float64, requires_grad=True).float())  # narrower now
    loss_of(torch.zeros(4, 6).bfloat16().float())  # needs no gradient
    loss_of(torch.zeros(4, 6, dtype=torch.bfloat16, requires_grad=True).float() * 2)  # computed
    assert logits.bytes == 0
