"""ampfuse.GraphedStep runs a training step eagerly on a CPU and as one CUDA graph on a GPU.

Tests that pass `monkeypatch` to a `Side` capture a fake graph on a CPU, too.
"""

import ampfuse
import pytest
import torch
from fake_graphs import capture
from graphed_models import CLASSES, Side, batch, train_both
from optim_models import assert_same_bits
from torch import nn
from torch.nn import functional

KINDS = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "clipped by hand": {"clip": 0.5},
    "masters": {"half": True},
    "remainders": {"half": True, "master_weights": "remainder", "state_dtype": torch.bfloat16},
    "8-bit moments": {
        "half": True,
        "master_weights": "stochastic",
        "state_dtype": "8bit",
        "ema": 0.9,
        "ema_dtype": torch.bfloat16,
    },
    "amsgrad, written back": {"amsgrad": True, "write_back_grads": True},
    "SGD": {"make": ampfuse.SGD, "momentum": 0.9, "half": True},
    "SGD without state": {"make": ampfuse.SGD},
    "accumulated": {"parts": 4},
    "checkpointed": {"checkpointed": True},
    "no scaler": {"scaler": {"enabled": False}},
}
# Without a graph, the step itself has only these ways.
WITHOUT_GRAPH = ["bf16", "clipped by hand", "accumulated", "no scaler"]


@pytest.mark.parametrize(
    ("kind", "captures"),
    [*((kind, True) for kind in KINDS), *((kind, False) for kind in WITHOUT_GRAPH)],
)
def test_every_step_equals_the_eager_step_bit_by_bit(device, kind, captures, monkeypatch):
    options = KINDS[kind]
    ours = Side(device, monkeypatch=monkeypatch if captures else None, **options)
    eager = Side(device, **options)
    step = ours.graphed()
    torch.manual_seed(1)
    losses = [step(*batch(device, seed)) for seed in range(6)]
    torch.manual_seed(1)
    expected = [eager.step(*batch(device, seed)) for seed in range(6)]
    assert_same_bits(losses, expected)  # later steps overwrite none
    assert not losses[0].requires_grad
    ours.assert_same(eager)
    assert_same_bits(ours.grads, eager.grads)


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_making_a_graphed_step_leaves_the_training_state_unchanged(device, options, monkeypatch):
    ours, other = Side(device, monkeypatch=monkeypatch, **options), Side(device, **options)
    train_both(ours.step, other.step, device, range(3))
    norm = ours.optimizer.grad_norm
    random_state = torch.get_rng_state()
    ours.graphed()
    assert torch.equal(torch.get_rng_state(), random_state)
    ours.assert_same(other)
    if norm is not None:
        assert_same_bits([ours.optimizer.grad_norm], [norm])


@pytest.mark.parametrize("kind", ["masters", "remainders", "amsgrad, written back", "no scaler"])
def test_making_a_graphed_step_before_the_first_step_creates_empty_state(device, kind, monkeypatch):
    options = KINDS[kind]
    ours, other = Side(device, monkeypatch=monkeypatch, **options), Side(device, **options)
    ours.graphed()

    assert_same_bits(ours.model.state_dict().values(), other.model.state_dict().values())
    assert ours.scaler.history() == []
    if ours.scaler.is_enabled():
        assert ours.scaler.get_scale() == 4.0
    assert set(ours.optimizer.state) == set(ours.model.parameters())
    for param, state in ours.optimizer.state.items():
        master = state.pop("master_param", None)
        if kind == "remainders":
            assert not master.any()
        elif kind == "masters":
            assert torch.equal(master, param.float())
        assert not any(value.any() for value in state.values())


@pytest.mark.parametrize("made", ["before", "after"])
def test_too_many_consecutive_skips_raise_scale_collapse_error(device, made, graphs_on_cpu):
    """A step may also be made after the scale collapsed."""
    ours = Side(device, scaler={"max_consecutive_skips": 2}, monkeypatch=graphs_on_cpu)
    with torch.no_grad():
        ours.model.layers[0].weight.fill_(torch.nan)  # so the step overflows in the capture, too
    step = ours.graphed() if made == "before" else ours.step

    def steps():
        for _ in range(20):
            step(*batch(device))
            if device.type == "cuda":  # the host checks only flags that have arrived
                torch.cuda.synchronize()

    with pytest.raises(ampfuse.ScaleCollapseError):
        steps()
    if made == "after":
        step = ours.graphed()
        with pytest.raises(ampfuse.ScaleCollapseError):
            step(*batch(device))


@pytest.mark.parametrize("kind", ["number", "tensor", "new tensor of one dimension", "scheduler"])
def test_learning_rate_may_change_between_steps(device, kind, monkeypatch):
    ours, eager = Side(device, monkeypatch=monkeypatch), Side(device)
    step = ours.graphed()
    schedulers = []
    if kind == "scheduler":
        schedulers = [
            torch.optim.lr_scheduler.StepLR(side.optimizer, 2, gamma=0.25) for side in (ours, eager)
        ]
    for seed in range(6):
        lr = 1e-2 / (seed + 1)
        if kind == "new tensor of one dimension":
            lr = torch.tensor([lr], device=device)
        if kind in ("number", "new tensor of one dimension"):
            ours.optimizer.param_groups[0]["lr"] = lr
        elif kind == "tensor":
            ours.optimizer.param_groups[0]["lr"].fill_(lr)
        if kind != "scheduler":
            eager.optimizer.param_groups[0]["lr"] = lr
        train_both(step, eager.step, device, [seed])
        for scheduler in schedulers:
            scheduler.step()
    ours.assert_same(eager)


@pytest.mark.parametrize("put", ["number", "tensor", "number for one"])
def test_groups_that_share_a_learning_rate_may_get_separate_ones(device, monkeypatch, put):
    sides = [Side(device, monkeypatch=monkeypatch), Side(device)]
    shared = [torch.tensor(1e-2, device=device) for _ in sides]
    separate = [torch.tensor(5e-2, device=device) for _ in sides]
    for side, rate in zip(sides, shared, strict=True):
        params = list(side.model.parameters())
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        side.optimizer = ampfuse.AdamW(groups, lr=rate, max_grad_norm=0.5)
    ours, eager = sides
    step = ours.graphed()
    for seed in range(6):
        for side, of_both, of_first in zip(sides, shared, separate, strict=True):
            first, second = side.optimizer.param_groups
            if seed == 2:
                of_both.fill_(2e-2)
            if seed == 4:
                first["lr"] = of_first if put == "tensor" else 0.5
            if seed == 5 and put == "tensor":
                of_first.fill_(0.25)
            if seed == 5 and put == "number":
                second["lr"] = 0.25
        train_both(step, eager.step, device, [seed])
        ours.assert_same(eager)


def test_a_learning_rate_tensor_stays_the_same_object(device):
    lr = torch.tensor(0.25, device=device)
    ours = Side(device, lr=lr)
    ours.graphed()
    assert ours.optimizer.param_groups[0]["lr"] is lr


def test_a_model_may_have_several_inputs(device):
    model = nn.Bilinear(6, 6, CLASSES, device=device)
    inputs, target = batch(device)
    step = ampfuse.GraphedStep(
        model,
        ampfuse.cross_entropy,
        ampfuse.AdamW(model.parameters(), lr=0.1),
        ampfuse.GradScaler(device.type),
        (inputs, inputs, target),
    )
    losses = [step(inputs, inputs, target).item() for _ in range(10)]
    assert losses[-1] < losses[0]


def test_parameters_need_not_belong_to_the_model(device):
    side = Side(device)
    side.model.requires_grad_(False)
    shift = nn.Parameter(torch.zeros(CLASSES, device=device))
    side.optimizer = ampfuse.AdamW([shift], max_grad_norm=1.0)
    step = side.graphed(
        loss_fn=lambda logits, target: functional.cross_entropy(logits + shift, target)
    )
    for _ in range(2):
        step(*batch(device))
    assert shift.abs().max() > 0


class Alternating(nn.Module):
    """A model whose second layer gets gradients only in every other call."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, CLASSES), nn.Linear(6, CLASSES)
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
    step = side.graphed()
    losses = [step(*batch(cpu)).item() for _ in range(4)]
    assert losses[0] > losses[2]
    assert losses[1] == losses[3]


@pytest.mark.needs_cuda
def test_steps_pass_torchs_sync_debug_mode(waits_are_errors):
    cuda = torch.device("cuda")
    step, inputs = Side(cuda).graphed(), batch(cuda)
    step(*inputs)
    torch.cuda.synchronize()
    waits_are_errors()
    for _ in range(3):
        step(*inputs)


@pytest.mark.needs_cuda
def test_batches_may_be_in_host_memory():
    cuda = torch.device("cuda")
    ours, eager = Side(cuda), Side(cuda)
    step = ours.graphed()
    for seed in range(3):
        torch.manual_seed(seed)
        step(*batch("cpu", seed))
        torch.manual_seed(seed)
        eager.step(*batch(cuda, seed))
    ours.assert_same(eager)


@pytest.mark.parametrize("enabled", [False, True])
def test_default_dtype_of_the_program_has_no_influence(device, enabled, monkeypatch):
    model = torch.nn.Linear(4, 3, device=device)
    optimizer = ampfuse.AdamW(model.parameters())
    scaler = ampfuse.GradScaler(device.type, enabled=enabled)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        sample = (torch.ones(2, 4, device=device, dtype=torch.float32),)
        sample += (torch.tensor([0, 2], device=device),)
        loss_fn = torch.nn.functional.cross_entropy
        step = ampfuse.GraphedStep(model, loss_fn, optimizer, scaler, sample)
        if device.type == "cpu":
            capture(step, monkeypatch)
        step(*sample)
    finally:
        torch.set_default_dtype(before)
    assert optimizer.state[model.weight]["step"] == 1
