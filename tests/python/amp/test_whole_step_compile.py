"""Forward, loss, backward, unscaling, clipping, step and update in one graph of torch.compile."""

import gc
import math
import weakref
from functools import partial

import ampfuse
import pytest
import torch
from optim_models import assert_same_bits
from whole_step import Training, Transformer, Twins, batch

pytestmark = pytest.mark.usefixtures("traced_backward")

KINDS = {
    "clipped by the optimizer": {"model": partial(Transformer, blocks=1)},
    "clipped by hand": {"clips": "by hand"},
    "clipped by the scaler": {"clips": "by the scaler"},
    "not clipped, fp16": {"max_grad_norm": None, "autocast": torch.float16},
    "bf16 parameters with remainders": {"half": True, "master_weights": "remainder"},
    "SGD": {"optimizer": partial(ampfuse.SGD, momentum=0.9), "half": True},
    "accumulated": {"batches": 2},
    "linear loss": {"model": partial(Transformer, linear_loss=True)},
    "checkpointed": {"model": partial(Transformer, checkpointing=True, blocks=1)},
}
if torch.__version__.startswith(("2.12.", "2.13.")):  # they refuse checkpoints in such a graph
    del KINDS["checkpointed"]
# torch 2.13 and 2.14 fail if the program of such a graph is divided into several (docs/compile.md).
MAY_BREAK = not torch.__version__.startswith(("2.13.", "2.14."))
OPERATORS = ["cross_entropy", "fused_adam", "multi_tensor_unscale_norm", "update_scale"]
CALLS = {
    "clipped by the optimizer": [*OPERATORS, "multi_tensor_norm"],
    "clipped by hand": [*OPERATORS, "multi_tensor_clip", "multi_tensor_norm", "multi_tensor_norm"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_in_a_single_graph_equal_eager_steps_bit_by_bit(device, kind):
    twins = Twins(device, **KINDS[kind])
    for seed in range(6):
        losses = twins.step(seed)
        assert_same_bits(losses[:1], losses[1:])
        twins.assert_same()
    assert twins.counter.frame_count == 1
    if kind in CALLS:
        assert twins.operators == sorted(CALLS[kind])


def test_overflows_rates_in_tensors_and_eager_steps_need_no_second_graph(device):
    twins = Twins(device)
    scales = []
    for seed in range(8):
        overflows = seed in (2, 3, 6)
        for side in twins.sides:
            side.factor.fill_(math.inf if overflows else 1.0)
            side.lr.fill_(0.1 * (seed % 4))
        inputs = batch(device, seed)
        step = twins.compiled.step if seed % 3 == 1 else twins.compiled_step
        step(*inputs)
        twins.eager.step(*inputs)
        twins.assert_same()
        scales.append(twins.compiled.scaler.get_scale())
        reports = [side.scaler.overflow_report(side.model) for side in twins.sides]
        assert reports[0] == (reports[1] if overflows else [])
    assert scales == [4, 8, 4, 2, 2, 4, 2, 2]
    histories = [side.scaler.history() for side in twins.sides]
    assert [record.skipped for record in histories[0]] == [s in (2, 3, 6) for s in range(8)]
    assert_same_bits(*([torch.tensor(history)] for history in histories))
    assert twins.counter.frame_count == 1


def test_float_learning_rate_needs_a_second_graph_when_it_first_changes(device):
    twins = Twins(device, lr=1e-2)
    for seed, lr in enumerate((1e-2, 1e-3, 0.5, 0.1, 0.25)):
        for side in twins.sides:
            side.optimizer.param_groups[0]["lr"] = lr
        twins.step(seed)
        twins.assert_same()
    assert twins.counter.frame_count == 2


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler")
def test_scheduler_between_steps_needs_no_second_graph(device):
    twins = Twins(device)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(side.optimizer, step_size=2, gamma=0.25)
        for side in twins.sides
    ]
    for seed in range(6):
        twins.step(seed)
        for scheduler in schedulers:
            scheduler.step()
    twins.assert_same()
    assert twins.counter.frame_count == 1


def test_scheduler_needs_no_graph_break_if_the_scaler_is_disabled(device):
    param = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = ampfuse.SGD([param], lr=torch.tensor(0.5))
    scaler = ampfuse.GradScaler(device.type, enabled=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step():
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    for _ in range(2):
        step()
        scheduler.step()
    assert param.tolist() == [0.25] * 3


@pytest.mark.parametrize("way", ["by the optimizer", "by a list", "by the model"])
def test_gradients_may_be_reset_in_any_way_and_batches_have_other_shapes(device, way):
    """torch.compile takes parameters first met in a list for constants without gradients."""
    twins = Twins(device)
    for side in twins.sides:
        side.resets = way
    for seed, rows in enumerate((4, 3, 7)):
        twins.step(seed, rows)
        twins.assert_same()


def test_optimizer_step_may_be_compiled_alone_before_the_whole_step(device):
    twins = Twins(device)
    for side in twins.sides:
        side.loss(*batch(device, 0)).backward()
    torch.compile(twins.compiled.optimizer.step, fullgraph=True, backend="aot_eager")()
    twins.eager.optimizer.step()
    for seed in range(3):
        twins.step(seed)
        twins.assert_same()


def test_states_load_from_eager_training_into_the_graph_and_back(device):
    twins = Twins(device, half=True)
    for seed in range(3):
        twins.step(seed)
        twins.assert_same()
    for ours, theirs in (("compiled", "eager"), ("eager", "compiled")):
        saved = getattr(twins, theirs)
        for name in ("model", "optimizer", "scaler"):
            state = getattr(saved, name).state_dict()
            getattr(getattr(twins, ours), name).load_state_dict(state)
        twins.step(4)
        twins.assert_same()
    assert twins.counter.frame_count == 1


class WritesGradients(ampfuse.AdamW):
    """An AdamW whose overridden step changes gradients before it calls AdamW.step."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.mul_(0.125)
        return super().step(closure)


def halve(optimizer, args, kwargs):
    for param in optimizer._traced.param_groups[0]["params"]:
        param.grad.mul_(0.125)


@pytest.mark.parametrize("writes", ["a derived step", "a hook"])
def test_norm_is_computed_after_the_program_changes_gradients(device, writes):
    optimizer = WritesGradients if writes == "a derived step" else ampfuse.AdamW
    twins = Twins(device, max_grad_norm=0.25, optimizer=optimizer)
    if writes == "a hook":
        for side in twins.sides:
            side.optimizer.register_step_pre_hook(halve)
    for seed in range(3):
        twins.step(seed)
        twins.assert_same()
        twins.assert_same_norms()


@pytest.mark.parametrize(
    ("traced", "hooked"), [(False, False), (False, True), *([(True, True)] * MAY_BREAK)]
)
@pytest.mark.filterwarnings("ignore")
def test_training_is_unchanged_if_backward_or_hooks_break_the_graph(device, traced, hooked):
    calls = []

    def hook(optimizer, args, kwargs):
        torch._dynamo.graph_break()
        calls.append(optimizer)

    sides = [Training(device), Training(device)]
    for side in sides if hooked else ():
        side.optimizer.register_step_pre_hook(hook)
        side.optimizer.register_step_post_hook(hook)
    with torch._dynamo.config.patch(trace_autograd_ops=traced):
        compiled = torch.compile(sides[0].step, backend="aot_eager")
        for seed in range(3):
            inputs = batch(device, seed)
            assert_same_bits([compiled(*inputs)], [sides[1].step(*inputs)])
    assert_same_bits(*(side.model.parameters() for side in sides))
    assert sides[0].scaler.state_dict() == sides[1].scaler.state_dict()
    assert len(calls) == 12 * hooked
    assert sides[0].optimizer._slot.signals is None


def test_a_parameter_that_replaces_another_gets_state_of_its_own(device):
    twins = Twins(device)
    twins.step(0)
    for side in twins.sides:
        new = torch.nn.Parameter(torch.ones_like(side.model.head.bias))
        params = side.optimizer.param_groups[0]["params"]
        params[-1] = side.params[-1] = side.model.head.bias = new
    for seed in range(1, 4):
        twins.step(seed)
        twins.assert_same()
    assert twins.compiled.model.head.bias in twins.compiled.optimizer.state


def test_limit_of_a_group_may_change_between_steps(device):
    twins = Twins(device)
    for seed, limit in enumerate((0.5, 0.25, 0.75, math.inf)):
        for side in twins.sides:
            side.optimizer.param_groups[0]["max_grad_norm"] = limit
        twins.step(seed)
        twins.assert_same()
        twins.assert_same_norms()


class StepsEagerly(ampfuse.AdamW):
    """An optimizer whose step is never compiled."""

    @torch._dynamo.disable
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "traces_backward"),
    [
        (partial(StepsEagerly, max_grad_norm=1.0), MAY_BREAK),
        # If it traces the backward pass, too, torch 2.15 fails: SpeculationLogDivergence.
        (partial(torch.optim.AdamW, fused=True), False),
    ],
)
def test_eager_step_gets_scale_and_flag_of_a_compiled_scaler(
    monkeypatch, device, make, traces_backward
):
    """The graph breaks at a step that gets them as attributes."""
    monkeypatch.setattr(torch._dynamo.config, "trace_autograd_ops", traces_backward)

    def trained(is_compiled):
        param = torch.nn.Parameter(torch.ones(4, device=device))
        optimizer, scaler = make([param], lr=0.1), ampfuse.GradScaler(device.type, init_scale=8.0)

        def step(factor):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        run = torch.compile(step, backend="eager") if is_compiled else step
        for factor in (1.0, math.inf, 2.0):
            run(torch.tensor(factor, device=device))
        return param.tolist(), scaler.state_dict()

    assert trained(is_compiled=True) == trained(is_compiled=False)


def test_step_of_the_scaler_may_be_all_that_is_compiled(device):
    param = torch.nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.AdamW([param], lr=0.1, fused=True)
    scaler = ampfuse.GradScaler(device.type, init_scale=8.0)
    step = torch.compile(ampfuse.GradScaler.step, backend="eager")
    for factor in (1.0, math.inf, 2.0):
        scaler.scale((param * factor).sum()).backward()
        step(scaler, optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.state[param]["step"].item() == 2
    assert scaler.get_scale() == 4.0


def test_compiled_step_keeps_no_parameter_alive_after_reset(device):
    twins = Twins(device)
    twins.step(0)
    scaler = twins.compiled.scaler
    alive = weakref.ref(next(twins.compiled.model.parameters()))
    del twins
    torch._dynamo.reset()
    gc.collect()
    assert alive() is None
    assert scaler.was_skipped() is False
    assert scaler.overflow_report(torch.nn.Linear(1, 1)) == []
