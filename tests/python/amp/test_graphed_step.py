"""ampfuse.GraphedStep runs a training step eagerly on a CPU and as one CUDA graph on a GPU."""

import ampfuse
import pytest
import torch
from graphed_models import CLASSES, Side, batch
from optim_models import assert_same_bits
from torch import nn
from torch.nn import functional

KINDS = {
    "bf16": {},
    "fp16": {"dtype": torch.float16},
    "clipped by hand": {"clip": 0.5},
    "masters": {"half": True},
    "remainders": {"half": True, "master_weights": "remainder", "state_dtype": torch.bfloat16},
    "amsgrad, written back": {"amsgrad": True, "write_back_grads": True},
    "accumulated": {"parts": 4},
    "checkpointed": {"checkpointed": True},
    "no scaler": {"scaler": {"enabled": False}},
}


EVERY_KIND = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


@EVERY_KIND
def test_every_step_equals_the_eager_step_bit_by_bit(device, options, graphs_on_cpu):
    ours, eager = Side(device, monkeypatch=graphs_on_cpu, **options), Side(device, **options)
    step = ours.graphed()
    torch.manual_seed(1)
    losses = [step(*batch(device, seed)) for seed in range(6)]
    torch.manual_seed(1)
    expected = [eager.step(*batch(device, seed)) for seed in range(6)]
    assert_same_bits(losses, expected)
    ours.assert_same(eager)
    grads = [[param.grad for param in side.model.parameters()] for side in (ours, eager)]
    assert_same_bits(*grads)


@EVERY_KIND
@pytest.mark.parametrize("steps_before", [0, 3])
def test_making_a_graphed_step_leaves_the_training_state_unchanged(
    device, options, steps_before, monkeypatch
):
    ours, other = Side(device, monkeypatch=monkeypatch, **options), Side(device, **options)
    for seed in range(steps_before):
        torch.manual_seed(seed)
        ours.step(*batch(device, seed))
        torch.manual_seed(seed)
        other.step(*batch(device, seed))
    norm = ours.optimizer.grad_norm
    random_state = torch.get_rng_state()
    ours.graphed()

    assert torch.equal(torch.get_rng_state(), random_state)
    if steps_before:
        ours.assert_same(other)
        if norm is not None:
            assert_same_bits([ours.optimizer.grad_norm], [norm])
        return
    assert_same_bits(ours.model.state_dict().values(), other.model.state_dict().values())
    assert ours.scaler.history() == []
    if ours.scaler.is_enabled():
        assert ours.scaler.get_scale() == 4.0
    assert set(ours.optimizer.state) == set(ours.model.parameters())
    for param, state in ours.optimizer.state.items():
        master = state.pop("master_param", None)
        if options.get("master_weights") == "remainder":
            assert not master.any()
        elif options.get("half"):
            assert torch.equal(master, param.float())
        assert not any(value.any() for value in state.values())


def test_overflow_is_reported_and_moves_the_scale_as_in_eager_steps(device, graphs_on_cpu):
    ours = Side(device, dtype=torch.float16, monkeypatch=graphs_on_cpu)
    eager = Side(device, dtype=torch.float16)
    step = ours.graphed()
    for seed in range(8):
        inputs, target = batch(device, seed)
        if seed in (2, 3, 6):
            inputs[0, 0] = float("inf")
        for train in (step, eager.step):
            torch.manual_seed(seed)
            train(inputs, target)
        assert ours.scaler.was_skipped() == eager.scaler.was_skipped() == (seed in (2, 3, 6))
        reports = [side.scaler.overflow_report(side.model) for side in (ours, eager)]
        if seed in (2, 3, 6):
            assert reports[0] == reports[1] != []
        assert ours.scaler.get_scale() == eager.scaler.get_scale()


def test_too_many_consecutive_skips_raise_scale_collapse_error(device, graphs_on_cpu):
    ours = Side(device, scaler={"max_consecutive_skips": 2}, monkeypatch=graphs_on_cpu)
    step = ours.graphed()
    inputs, target = batch(device)
    inputs[:] = float("nan")

    def steps():
        for _ in range(20):
            step(inputs, target)
            if device.type == "cuda":  # the host checks only flags that have arrived
                torch.cuda.synchronize()

    with pytest.raises(ampfuse.ScaleCollapseError):
        steps()


@pytest.mark.parametrize("kind", ["number", "tensor", "scheduler"])
def test_learning_rate_may_change_between_steps(device, kind, graphs_on_cpu):
    ours, eager = Side(device, monkeypatch=graphs_on_cpu), Side(device)
    step = ours.graphed()
    schedulers = []
    if kind == "scheduler":
        schedulers = [
            torch.optim.lr_scheduler.StepLR(side.optimizer, 2, gamma=0.25) for side in (ours, eager)
        ]
    for seed in range(6):
        lr = 1e-2 / (seed + 1)
        if kind == "number":
            ours.optimizer.param_groups[0]["lr"] = lr
        elif kind == "tensor":
            ours.optimizer.param_groups[0]["lr"].fill_(lr)
        if kind != "scheduler":
            eager.optimizer.param_groups[0]["lr"] = lr
        for train in (step, eager.step):
            torch.manual_seed(seed)
            train(*batch(device, seed))
        for scheduler in schedulers:
            scheduler.step()
    ours.assert_same(eager)


def test_a_learning_rate_tensor_stays_the_same_object(device):
    lr = torch.tensor(0.25, device=device)
    ours = Side(device, lr=lr)
    ours.graphed()
    assert ours.optimizer.param_groups[0]["lr"] is lr


def test_batches_that_require_grad_are_refused(device, graphs_on_cpu):
    step = Side(device, monkeypatch=graphs_on_cpu).graphed()
    inputs, target = batch(device)
    with pytest.raises(ValueError, match=r"batch\[0\]: expected .* does not require grad"):
        step(inputs.requires_grad_(), target)


def test_losses_are_not_overwritten_by_later_steps(device):
    ours = Side(device)
    step = ours.graphed()
    losses = [step(*batch(device, seed)) for seed in range(4)]
    values = [loss.item() for loss in losses]
    assert len(set(values)) == 4
    assert not any(loss.requires_grad for loss in losses)


def test_a_model_may_have_several_inputs(device):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, CLASSES)

        def forward(self, first, second):
            return self.linear(first + second)

    model = Sum().to(device)
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


@pytest.mark.parametrize("wrong", ["few", "shape", "dtype"])
def test_batches_unlike_the_sample_are_refused(device, wrong):
    ours = Side(device)
    step = ours.graphed()
    inputs, target = batch(device)
    before = [param.clone() for param in ours.model.parameters()]
    bad, error, words = {
        "few": ((inputs,), TypeError, "expected 2 tensors, as in sample, got 1"),
        "shape": ((inputs[:4], target), ValueError, r"batch\[0\]: expected torch.float32 of shape"),
        "dtype": ((inputs, target.int()), ValueError, r"batch\[1\]: expected torch.int64"),
    }[wrong]
    with pytest.raises(error, match=words):
        step(*bad)
    assert_same_bits(ours.model.parameters(), before)


CHANGES = {
    "weight_decay of group 0": lambda side: side.optimizer.param_groups[0].update(weight_decay=0.5),
    "betas of group 0": lambda side: side.optimizer.param_groups[0].update(betas=(0.5, 0.5)),
    "optimizer.max_grad_norm": lambda side: setattr(side.optimizer, "max_grad_norm", 2.0),
    "parameters": lambda side: side.optimizer.add_param_group(
        {"params": [nn.Parameter(torch.ones(1, device=side.device))]}
    ),
    "parameters ": lambda side: next(side.model.parameters()).requires_grad_(False),
    "parameters  ": lambda side: setattr(
        next(side.model.parameters()), "data", next(side.model.parameters()).data.clone()
    ),
    "model.training ": lambda side: side.model.layers[1].eval(),
    "model.training": lambda side: side.model.eval(),
    "scaler.growth_interval": lambda side: side.scaler.set_growth_interval(7),
    "scaler.growth_factor": lambda side: side.scaler.set_growth_factor(4.0),
    "scaler.backoff_factor": lambda side: side.scaler.set_backoff_factor(0.25),
}


@pytest.mark.parametrize("name", CHANGES)
def test_step_refuses_options_that_changed_since_capture(device, name):
    ours = Side(device)
    step = ours.graphed()
    CHANGES[name](ours)
    with pytest.raises(RuntimeError, match=f"changed since the step was made: {name.strip()}"):
        step(*batch(device))


def test_step_compares_options_of_groups_with_those_of_the_constructor(device):
    ours = Side(device, write_back_grads=True)
    step = ours.graphed()
    ours.optimizer.param_groups[0]["write_back_grads"] = True
    step(*batch(device))
    ours.optimizer.param_groups[0]["write_back_grads"] = False
    with pytest.raises(RuntimeError, match=r"changed since .* write_back_grads of group 0"):
        step(*batch(device))


def test_unsupported_optimizers_scalers_and_samples_are_refused(device):
    side = Side(device)
    sample = batch(device)
    sgd = torch.optim.SGD(side.model.parameters())
    torchs = torch.amp.GradScaler(device.type)
    for optimizer, scaler, given, error, words in (
        (
            sgd,
            side.scaler,
            sample,
            TypeError,
            "expected ampfuse.Adam or AdamW, got torch.optim.sgd.SGD",
        ),
        (
            side.optimizer,
            torchs,
            sample,
            TypeError,
            "scaler: expected ampfuse.GradScaler, got torch.amp",
        ),
        (side.optimizer, side.scaler, (), ValueError, "got nothing"),
        (side.optimizer, side.scaler, (sample[0], 3), TypeError, r"sample\[1\]: expected a tensor"),
        (side.optimizer, side.scaler, (sample[0].to("meta"),), ValueError, "got meta"),
    ):
        with pytest.raises(error, match=words):
            ampfuse.GraphedStep(side.model, functional.cross_entropy, optimizer, scaler, given)


@pytest.mark.parametrize("parts", [0, 3])
def test_micro_batches_must_divide_the_batch_equally(device, parts):
    with pytest.raises(ValueError, match="micro_batches"):
        Side(device, parts=parts).graphed()


@pytest.mark.needs_cuda
def test_steps_pass_torchs_sync_debug_mode(device):
    ours = Side(device)
    step = ours.graphed()
    inputs = batch(device)
    step(*inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.needs_cuda
def test_batches_may_be_in_host_memory(device):
    ours, eager = Side(device), Side(device)
    step = ours.graphed()
    for seed in range(3):
        torch.manual_seed(seed)
        step(*batch("cpu", seed))
        torch.manual_seed(seed)
        eager.step(*batch(device, seed))
    ours.assert_same(eager)
