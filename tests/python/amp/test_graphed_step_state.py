"""State that an ampfuse.GraphedStep shares with checkpoints, eager steps, hooks and user writes."""

import copy

import ampfuse
import pytest
import torch
from graphed_models import CLASSES, Side, batch, train_both
from optim_models import assert_same_bits
from torch import nn
from torch.nn import functional


@pytest.mark.parametrize(("steps_before", "from_torch"), [(0, False), (3, False), (3, True)])
def test_checkpoints_load_into_the_objects_of_a_graphed_step(
    device, monkeypatch, steps_before, from_torch
):
    """The checkpoint is loaded twice; the second load meets the state that the first one left."""
    options = {"half": True, "max_grad_norm": 0.5}
    ours, other = Side(device, monkeypatch=monkeypatch, **options), Side(device, **options)
    step = ours.graphed()
    for seed in range(steps_before):
        torch.manual_seed(seed)
        other.step(*batch(device, seed))
    names = ("model", "optimizer", "scaler")
    saved = copy.deepcopy({name: getattr(other, name).state_dict() for name in names})
    if from_torch:
        for state in saved["optimizer"]["state"].values():
            del state["master_param"]
    for _ in range(2):
        step(*batch(device, 5))
        for side in (ours, other):
            for name, state in saved.items():
                getattr(side, name).load_state_dict(copy.deepcopy(state))
        train_both(step, other.step, device, (7, 8))
        assert_same_bits(ours.tensors, other.tensors)
        assert ours.scaler.get_scale() == other.scaler.get_scale()


@pytest.mark.parametrize("cls", [ampfuse.AdamW, torch.optim.AdamW])
def test_checkpoints_load_before_a_graphed_step_is_made(device, monkeypatch, cls):
    ours, other = Side(device, monkeypatch=monkeypatch), Side(device)
    source = cls(other.model.parameters(), lr=1e-2)
    functional.cross_entropy(other.model(batch(device)[0]), batch(device)[1]).backward()
    source.step()
    saved = source.state_dict(), other.model.state_dict()
    for side in (ours, other):
        side.optimizer.load_state_dict(copy.deepcopy(saved[0]))
        side.model.load_state_dict(copy.deepcopy(saved[1]))
    train_both(ours.graphed(), other.step, device, range(3))
    ours.assert_same(other)


def test_overflows_are_reported_by_two_graphed_steps_and_an_eager_step_that_share_a_scaler(
    device, monkeypatch
):
    ours, eager = Side(device, monkeypatch=monkeypatch), Side(device)
    steps = [ours.graphed(), ours.graphed(), ours.step]
    for seed, overflows in enumerate((0, 1, 0, 0, 1, 1, 0, 0)):
        inputs, target = batch(device, seed)
        if overflows:
            inputs[0, 0] = torch.nan
        for train in (steps[seed % 3], eager.step):
            torch.manual_seed(seed)
            train(inputs, target)
        assert ours.scaler.was_skipped() == eager.scaler.was_skipped() == bool(overflows)
        assert ours.scaler.step_skipped.item() == bool(overflows)
        reports = [side.scaler.overflow_report(side.model) for side in (ours, eager)]
        assert not overflows or reports[0] == reports[1] != []
        assert ours.scaler.get_scale() == eager.scaler.get_scale()
        assert_same_bits(ours.grads, eager.grads)
        if seed == 3:
            ours.optimizer.zero_grad()


def test_gradients_are_there_after_a_step_if_the_first_and_last_parameter_are_frozen(
    device, monkeypatch
):
    ours, eager = Side(device, monkeypatch=monkeypatch), Side(device)
    for side in (ours, eager):
        first, *_, last = side.model.parameters()
        first.requires_grad_(False), last.requires_grad_(False)
    step = ours.graphed()
    for seed in range(2):
        ours.optimizer.zero_grad()
        train_both(step, eager.step, device, [seed])
        assert_same_bits(ours.grads[1:-1], eager.grads[1:-1])


def test_making_a_graphed_step_keeps_the_results_of_the_last_step(device, graphs_on_cpu):
    ours = Side(device, monkeypatch=graphs_on_cpu)
    inputs, target = batch(device)
    ours.step(inputs * torch.nan, target)
    ours.scaler.unscale_(other := torch.optim.SGD([nn.Parameter(torch.ones(2, device=device))]))
    reports = [ours.scaler.overflow_report(ours.model)]
    ours.model.layers[1].running_mean.zero_()
    ours.graphed()
    assert ours.scaler.was_skipped()
    assert [ours.scaler.overflow_report(ours.model)] == reports
    if graphs_on_cpu is None and device.type == "cpu":
        with pytest.raises(RuntimeError, match="already been called"):
            ours.scaler.unscale_(other)


class CountingLoss(nn.Module):
    """A loss that counts its calls in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, logits, target):
        self.calls += 1
        return nn.functional.cross_entropy(logits, target)


def test_making_a_graphed_step_leaves_a_loss_that_is_a_module_unchanged(device, monkeypatch):
    ours = Side(device, monkeypatch=monkeypatch)
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
    with pytest.raises(error, match=words):
        ours.graphed(broken)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert broken.mean == 0
    for side in (ours, other):
        torch.manual_seed(1)
        side.step(*batch(device, 1))
    assert_same_bits(ours.model.parameters(), other.model.parameters())
    assert ours.scaler.state_dict() == other.scaler.state_dict()


@pytest.mark.parametrize("raises", ["a hook of the step", "the model"])
def test_a_step_succeeds_after_a_step_that_raised(raises):
    """On a GPU, hooks are called when it is made, and never again."""
    device = torch.device("cpu")
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
    step = Side(torch.device("cuda")).graphed(loss_fn=ampfuse.cross_entropy)
    inputs, target = batch("cuda", 1)
    step(inputs, torch.full_like(target, CLASSES))
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        step(inputs, target)
    step(inputs, target)


def test_replays_check_for_targets_out_of_range(monkeypatch):
    step = Side(torch.device("cpu"), monkeypatch=monkeypatch).graphed()
    looks = []
    monkeypatch.setattr(ampfuse._C, "check_targets", lambda: looks.append(1))
    step(*batch("cpu", 1))
    assert looks == [1]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", ["no_grad", "data"])
def test_parameters_written_between_replays_keep_the_written_values(device, monkeypatch, write):
    side = Side(device, half=True, monkeypatch=monkeypatch)
    step = side.graphed()
    step(*batch(device, 1))
    for group in side.optimizer.param_groups:
        group["lr"] = 0.0
    params = list(side.model.parameters())
    values = [torch.full_like(param, 0.5).detach() for param in params]

    for param, value in zip(params, values, strict=True):
        if write == "data":
            param.data.copy_(value)
        else:
            with torch.no_grad():
                param.copy_(value)
    step(*batch(device, 2))

    assert_same_bits([param.detach() for param in params], values)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kinds", [(True, "remainder"), ("remainder", True)])
def test_writes_between_replays_leave_the_remainders_of_other_groups_as_they_are(
    device, monkeypatch, kinds
):
    def side(**arguments):
        side = Side(device, half=True, **arguments)
        layers = side.model.layers[0], side.model.layers[4]
        groups = [
            {"params": layer.parameters(), "master_weights": kind}
            for layer, kind in zip(layers, kinds, strict=True)
        ]
        side.optimizer = ampfuse.AdamW(groups, lr=1e-2)
        return side

    ours, eager = side(monkeypatch=monkeypatch), side()
    step = ours.graphed()
    for seed in (1, 2):
        train_both(step, eager.step, device, [seed])
        for each in (ours, eager):
            with torch.no_grad():
                for layer in (0, 4):
                    each.model.layers[layer].bias.fill_(0.25)

    ours.assert_same(eager)
