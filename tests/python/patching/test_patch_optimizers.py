"""torch.optim.Adam and AdamW while they are patched, and the cases that are left to torch."""

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS

BOTH = pytest.mark.parametrize("name", ["Adam", "AdamW"])


@pytest.fixture(autouse=True)
def patched():
    PARTS["optimizers"].usage.forget()
    with ampfuse.patched("optimizers"):
        yield


def parameters(device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), ()]
    made = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    return [torch.nn.Parameter(tensor) for tensor in made]


def original(name):
    return getattr(torch.optim, name).__mro__[1]


def step(optimizer, params, number):
    generator = torch.Generator().manual_seed(number)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p)
    optimizer.step()


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-6, "weight_decay": 0.3},
        {"amsgrad": True, "maximize": True, "foreach": True},
        {"capturable": False, "fused": False},
        {"foreach": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_patched_optimizers_step_like_torchs(device, name, options, dtype):
    params, others = parameters(device, dtype), parameters(device, dtype)
    optimizer, reference = (
        getattr(torch.optim, name)(params, **options),
        original(name)(others, **options),
    )
    assert isinstance(optimizer, getattr(ampfuse, name))
    for number in range(5):
        step(optimizer, params, number)
        step(reference, others, number)
    for p, other in zip(params, others, strict=True):
        torch.testing.assert_close(p, other, rtol=2e-6, atol=1e-7)
    assert PARTS["optimizers"].usage.uses == 5


@BOTH
def test_positional_arguments_have_torchs_order(name):
    optimizer = getattr(torch.optim, name)(parameters("cpu"), 0.1, (0.5, 0.9), 1e-6, 0.3, True)
    group = optimizer.param_groups[0]
    assert [group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")] == [
        0.1,
        (0.5, 0.9),
        1e-6,
        0.3,
        True,
    ]


@BOTH
def test_parameters_are_accepted_in_every_form_that_torch_accepts(name):
    cls = getattr(torch.optim, name)
    a, b = parameters("cpu")[:2]
    ways = [
        iter([a, b]),
        [{"params": iter([a])}, {"params": b, "lr": 0.5}],
        iter([{"params": [a]}, {"params": [b]}]),
        iter([("a", a), ("b", b)]),
        [{"params": [("a", a)]}, {"params": [("b", b)]}],
    ]
    for params in ways:
        optimizer = cls(params)
        assert isinstance(optimizer, getattr(ampfuse, name))
        assert [p for group in optimizer.param_groups for p in group["params"]] == [a, b]


@pytest.mark.parametrize(
    "states",
    [
        {torch.bfloat16: torch.bfloat16},
        {torch.bfloat16: torch.bfloat16, torch.float32: torch.float32},
        {torch.float16: torch.float32, torch.float64: torch.float64},
    ],
)
def test_patched_optimizers_keep_no_masters_of_16_bit_parameters(states):
    params = [torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in states]
    optimizer = torch.optim.AdamW(params)
    step(optimizer, params, 0)
    for p in params:
        assert "master_param" not in optimizer.state[p]
        assert optimizer.state[p]["exp_avg"].dtype == states[p.dtype]


@BOTH
def test_unsupported_optimizer_is_left_to_torch_and_the_reason_logged_once(name, caplog):
    cls, torchs = getattr(torch.optim, name), original(name)
    beta = torch.tensor(0.9)
    for _ in range(2):
        cases = {
            "differentiable=True": cls(parameters("cpu"), differentiable=True),
            "parameters on meta": cls([torch.nn.Parameter(torch.ones(2, device="meta"))]),
            "betas that are not floats": cls(parameters("cpu"), betas=(beta, beta), foreach=False),
        }
    for optimizer in cases.values():
        assert type(optimizer) is torchs
    for reason in cases:
        told = [r.getMessage() for r in caplog.records if reason in r.getMessage()]
        assert told == [f"torch.optim.{name} is left to torch: {reason}"]
    assert PARTS["optimizers"].usage.fallbacks == dict.fromkeys(cases, 2)


@BOTH
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((), {}),
        (([],), {}),
        ((torch.ones(2),), {}),
        ((5,), {}),
        (([torch.ones(2, requires_grad=True)],), {"lr": -1.0}),
        (([torch.ones(2, requires_grad=True)],), {"betas": (2.0, 0.9)}),
        (([torch.ones(2, requires_grad=True)],), {"bogus": 1}),
        (([{"params": {torch.ones(2, requires_grad=True)}}],), {}),
    ],
)
def test_constructor_errors_equal_those_of_torch(name, arguments, options):
    errors = []
    for cls in (original(name), getattr(torch.optim, name)):
        try:
            cls(*arguments, **options)
        except Exception as error:
            errors.append((type(error), str(error)))
    assert len(errors) == 2
    assert errors[0] == errors[1]


@BOTH
def test_state_dicts_are_exchanged_with_torchs_optimizers(name):
    params, others = parameters("cpu"), parameters("cpu")
    optimizer, reference = getattr(torch.optim, name)(params), original(name)(others)
    for number in range(3):
        step(optimizer, params, number)
        step(reference, others, number)
    optimizer.load_state_dict(reference.state_dict())
    fresh = original(name)(parameters("cpu"))
    fresh.load_state_dict(optimizer.state_dict())
    for p, other in zip(params, fresh.param_groups[0]["params"], strict=True):
        assert torch.equal(optimizer.state[p]["exp_avg"], fresh.state[other]["exp_avg"])


def test_scheduler_drives_a_patched_optimizer():
    params = parameters("cpu")
    optimizer = torch.optim.AdamW(params, lr=1.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    step(optimizer, params, 0)
    scheduler.step()
    assert optimizer.param_groups[0]["betas"][0] != 0.9


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
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
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return words.weight.detach()

    with ampfuse.patched("scaler"):
        ours = trained()
    ampfuse.unpatch()
    torch.testing.assert_close(ours, trained())


def train(params, optimizer, scaler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        scaler.scale(sum(p.sum() for p in params)).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize(
    ("options", "avoided"),
    [
        ({}, 3),  # torch's scaler reads its flag in each of four steps, ours in the first one
        ({"fused": True}, 0),  # torch's scaler does not read it either
    ],
    ids=str,
)
def test_host_waits_that_only_torch_needs_are_counted_on_a_gpu(
    device, options, avoided, monkeypatch
):
    params = parameters(device)
    optimizer = torch.optim.AdamW(params, **options)
    scaler = ampfuse.GradScaler(device)
    train(params, optimizer, scaler, 4)
    usage = PARTS["optimizers"].usage
    assert usage.waits_avoided == (avoided if device == "cuda" else 0)

    usage.forget()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # so that CPUs count, too
    train(params, optimizer, scaler, 3)
    assert usage.waits_avoided == min(avoided, 3)


def test_steps_without_a_scaler_avoid_no_host_waits(device, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    params = parameters(device)
    step(torch.optim.AdamW(params), params, 0)
    assert PARTS["optimizers"].usage.waits_avoided == 0
