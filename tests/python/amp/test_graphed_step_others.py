"""ampfuse.GraphedStep together with checkpoints, eager steps, hooks, failures and user writes."""

import copy

import ampfuse
import pytest
import torch
from graphed_models import CLASSES, Side, batch
from optim_models import assert_same_bits
from torch import nn
from torch.nn import functional


@pytest.mark.parametrize("from_torch", [False, True])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_checkpoints_load_into_the_objects_of_a_graphed_step(
    device, graphs_on_cpu, steps_before, from_torch
):
    """The checkpoint is loaded twice; the second load meets the state that the first one left."""
    options = {"half": True, "max_grad_norm": 0.5}
    ours, other = (Side(device, monkeypatch=m, **options) for m in (graphs_on_cpu, None))
    step = ours.graphed()
    for seed in range(steps_before):
        torch.manual_seed(seed)
        other.step(*batch(device, seed))
    saved = copy.deepcopy(
        [getattr(other, name).state_dict() for name in ("model", "optimizer", "scaler")]
    )
    if from_torch:
        for state in saved[1]["state"].values():
            del state["master_param"]
    for _ in range(2):
        step(*batch(device, 5))
        for side in (ours, other):
            for name, state in zip(("model", "optimizer", "scaler"), saved, strict=True):
                getattr(side, name).load_state_dict(copy.deepcopy(state))
        for seed in range(7, 9):
            for train in (step, other.step):
                torch.manual_seed(seed)
                train(*batch(device, seed))
        assert_same_bits(ours.tensors, other.tensors)
        assert ours.scaler.get_scale() == other.scaler.get_scale()


@pytest.mark.parametrize("cls", [ampfuse.AdamW, torch.optim.AdamW])
def test_checkpoints_load_before_a_graphed_step_is_made(device, graphs_on_cpu, cls):
    ours, other = (Side(device, monkeypatch=m) for m in (graphs_on_cpu, None))
    source = cls(other.model.parameters(), lr=1e-2)
    functional.cross_entropy(other.model(batch(device)[0]), batch(device)[1]).backward()
    source.step()
    saved = source.state_dict(), other.model.state_dict()
    for side in (ours, other):
        side.optimizer.load_state_dict(copy.deepcopy(saved[0]))
        side.model.load_state_dict(copy.deepcopy(saved[1]))
    step = ours.graphed()
    for seed in range(3):
        for train in (step, other.step):
            torch.manual_seed(seed)
            train(*batch(device, seed))
    ours.assert_same(other)


def test_two_graphed_steps_and_an_eager_step_may_share_a_scaler(device, graphs_on_cpu):
    ours, eager = Side(device, monkeypatch=graphs_on_cpu), Side(device)
    steps = [ours.graphed(), ours.graphed(), ours.step]
    for seed, overflows in enumerate((0, 1, 0, 0, 1, 1, 0, 0)):
        inputs, target = batch(device, seed)
        if overflows:
            inputs[0, 0] = float("nan")
        torch.manual_seed(seed)
        steps[seed % 3](inputs, target)
        torch.manual_seed(seed)
        eager.step(inputs, target)
        assert ours.scaler.was_skipped() == eager.scaler.was_skipped() == bool(overflows)
        assert ours.scaler.step_skipped.item() == bool(overflows)
        reports = [side.scaler.overflow_report(side.model) for side in (ours, eager)]
        assert not overflows or reports[0] == reports[1] != []
        grads = [[param.grad for param in side.model.parameters()] for side in (ours, eager)]
        assert_same_bits(*grads)
        if seed == 3:
            ours.optimizer.zero_grad()
    assert ours.scaler.get_scale() == eager.scaler.get_scale()


def test_gradients_are_there_after_a_step_if_the_first_and_last_parameter_are_frozen(
    device, graphs_on_cpu
):
    ours, eager = Side(device, monkeypatch=graphs_on_cpu), Side(device)
    for side in (ours, eager):
        first, *_, last = side.model.parameters()
        first.requires_grad_(False), last.requires_grad_(False)
    step = ours.graphed()
    for seed in range(2):
        for train, side in ((step, ours), (eager.step, eager)):
            side.optimizer.zero_grad()
            torch.manual_seed(seed)
            train(*batch(device, seed))
        grads = [[param.grad for param in side.model.parameters()][1:-1] for side in (ours, eager)]
        assert_same_bits(*grads)


def test_making_a_graphed_step_keeps_the_results_of_the_last_step(device, graphs_on_cpu):
    ours = Side(device, monkeypatch=graphs_on_cpu)
    inputs, target = batch(device)
    ours.step(inputs * float("nan"), target)
    ours.scaler.unscale_(other := torch.optim.SGD([nn.Parameter(torch.ones(2, device=device))]))
    reports = [ours.scaler.overflow_report(ours.model)]
    ours.model.layers[1].running_mean.zero_()
    ours.graphed()
    assert ours.scaler.was_skipped()
    assert [ours.scaler.overflow_report(ours.model)] == reports
    if graphs_on_cpu is None and device.type == "cpu":
        with pytest.raises(RuntimeError, match="already been called"):
            ours.scaler.unscale_(other)


def test_a_graphed_step_may_be_made_after_the_scale_collapsed(device, graphs_on_cpu):
    ours = Side(device, scaler={"max_consecutive_skips": 2}, monkeypatch=graphs_on_cpu)
    with torch.no_grad():
        ours.model.layers[0].weight.fill_(float("nan"))  # so the step overflows in the capture, too

    def steps():
        for _ in range(20):
            ours.step(*batch(device))
            if device.type == "cuda":  # the host checks only flags that have arrived
                torch.cuda.synchronize()

    with pytest.raises(ampfuse.ScaleCollapseError):
        steps()

    step = ours.graphed()

    with pytest.raises(ampfuse.ScaleCollapseError):
        step(*batch(device))


class CountingLoss(nn.Module):
    """A loss that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits, target):
        self.calls += 1
        return nn.functional.cross_entropy(logits, target)


def test_making_a_graphed_step_leaves_a_loss_that_is_a_module_unchanged(device, graphs_on_cpu):
    ours = Side(device, monkeypatch=graphs_on_cpu)
    loss_fn = CountingLoss().to(device)

    step = ours.graphed(loss_fn=loss_fn)

    assert loss_fn.calls == 0
    loss_fn.eval()
    with pytest.raises(RuntimeError, match="the model is in another mode"):
        step(*batch(device))


class Broken(nn.Module):
    """A model whose forward raises in the second call or, without `raises`, replaces a buffer."""

    def __init__(self, side, raises):
        super().__init__()
        self.side, self.raises, self.calls = [side], raises, 0
        self.register_buffer("mean", torch.zeros((), device=side.device))

    def forward(self, inputs):
        self.calls += 1
        if not self.raises:
            self.mean = self.mean + 1
        elif self.calls == 2:
            raise KeyError("no such layer")
        return self.side[0].model(inputs)

    def parameters(self, recurse=True):
        return self.side[0].model.parameters()


@pytest.mark.parametrize(
    ("raises", "error", "words"),
    [
        (True, KeyError, "no such layer"),
        (False, RuntimeError, "mean: forward.. replaces this buffer"),
    ],
)
def test_a_failed_capture_leaves_parameters_and_scaler_unchanged(
    device, monkeypatch, raises, error, words
):
    ours, other = Side(device, monkeypatch=monkeypatch), Side(device)
    for side in (ours, other):
        torch.manual_seed(0)
        side.step(*batch(device))
    broken = Broken(ours, raises)
    random_state = torch.get_rng_state()
    buffers = [buffer.clone() for buffer in ours.model.buffers()]
    with pytest.raises(error, match=words):
        ours.graphed(broken)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert broken.mean == 0
    if raises:
        assert len(buffers) == len(list(ours.model.buffers()))
    for side in (ours, other):
        torch.manual_seed(1)
        side.step(*batch(device, 1))
    assert_same_bits(ours.model.parameters(), other.model.parameters())
    assert ours.scaler.state_dict() == other.scaler.state_dict()


@pytest.mark.parametrize("put", ["number", "tensor", "number for one"])
def test_groups_that_share_a_learning_rate_may_get_separate_ones(device, graphs_on_cpu, put):
    sides = []
    for monkeypatch in (graphs_on_cpu, None):
        shared = torch.tensor(1e-2, device=device)
        side = Side(device, monkeypatch=monkeypatch)
        params = list(side.model.parameters())
        groups = [{"params": params[:2]}, {"params": params[2:]}]
        side.optimizer = ampfuse.AdamW(groups, lr=shared, max_grad_norm=0.5)
        sides.append((side, shared))
    (ours, our_rate), (eager, rate) = sides
    step = ours.graphed()
    ours_put, theirs_put = (torch.tensor(5e-2, device=device) for _ in range(2))
    for seed in range(6):
        if seed == 2:
            our_rate.fill_(2e-2), rate.fill_(2e-2)  # changes the rate of both groups
        if seed == 4 and put != "tensor":
            ours.optimizer.param_groups[0]["lr"] = eager.optimizer.param_groups[0]["lr"] = 0.5
        if seed == 4 and put == "tensor":
            ours.optimizer.param_groups[0]["lr"] = ours_put
            eager.optimizer.param_groups[0]["lr"] = theirs_put
        if seed == 5 and put == "tensor":
            ours_put.fill_(0.25), theirs_put.fill_(0.25)
        if seed == 5 and put == "number":
            ours.optimizer.param_groups[1]["lr"] = eager.optimizer.param_groups[1]["lr"] = 0.25
        for train in (step, eager.step):
            torch.manual_seed(seed)
            train(*batch(device, seed))
        ours.assert_same(eager)


def test_a_single_tensor_is_refused_as_sample(device):
    side = Side(device)
    with pytest.raises(TypeError, match="expected a sequence of tensors, got a tensor"):
        ampfuse.GraphedStep(
            side.model, ampfuse.cross_entropy, side.optimizer, side.scaler, batch(device)[0]
        )


@pytest.mark.parametrize("raises", ["a hook of the step", "the model"])
def test_a_step_succeeds_after_a_step_that_raised(device, raises):
    if device.type == "cuda":
        pytest.skip("hooks are called when it is made, and never again")
    ours, other = Side(device, clip=0.5), Side(device, clip=0.5)
    step = ours.graphed()

    def fail(*_):
        handle.remove()
        raise KeyError("once")

    if raises == "the model":
        handle = ours.model.register_forward_pre_hook(fail)
    else:
        handle = ours.optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="once"):
        step(*batch(device))
    for train, side in ((step, ours), (other.step, other)):
        side.model.load_state_dict(Side(device).model.state_dict())
        torch.manual_seed(3)
        train(*batch(device))
    assert_same_bits(ours.model.parameters(), other.model.parameters())
    assert ours.scaler.get_scale() == other.scaler.get_scale()


@pytest.mark.needs_cuda
def test_learning_rates_are_floats_again_after_a_failed_capture():
    ours = Side(torch.device("cuda"))
    with pytest.raises(KeyError, match="no such layer"):
        ours.graphed(Broken(ours, raises=True))
    assert [type(group["lr"]) for group in ours.optimizer.param_groups] == [float]


@pytest.mark.needs_cuda
def test_a_target_out_of_range_is_reported_before_the_next_replay():
    side = Side(torch.device("cuda"))
    step = ampfuse.GraphedStep(
        side.model,
        ampfuse.cross_entropy,
        side.optimizer,
        side.scaler,
        batch(torch.device("cuda")),
        autocast=torch.bfloat16,
    )
    inputs, target = batch(torch.device("cuda"), 1)
    step(inputs, torch.full_like(target, CLASSES))
    torch.cuda.synchronize()

    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        step(inputs, target)
    step(inputs, target)


def test_replays_check_for_targets_out_of_range(device, monkeypatch):
    if device.type == "cuda":
        pytest.skip("a GPU has graphs")
    side = Side(device, monkeypatch=monkeypatch)
    step = side.graphed()
    looks = []
    monkeypatch.setattr(ampfuse._C, "check_targets", lambda: looks.append(1))

    step(*batch(device, 1))

    assert looks == [1]


def test_assigned_rate_may_have_one_dimension(device, graphs_on_cpu):
    ours, eager = Side(device, monkeypatch=graphs_on_cpu), Side(device)
    step = ours.graphed()
    for side in (ours, eager):
        side.optimizer.param_groups[0]["lr"] = torch.tensor([0.05], device=device)
    for take in (step, eager.step):
        torch.manual_seed(1)
        take(*batch(device, 0))
    ours.assert_same(eager)
