"""Forward, loss, backward, unscaling, clipping, step and update in one graph of torch.compile."""

import gc
import weakref
from functools import partial

import ampfuse
import pytest
import torch
from functorch.compile import make_boxed_func
from optim_models import assert_same_bits
from torch._dynamo.backends.common import aot_autograd
from whole_step import Training, Transformer, Twins, batch

pytestmark = pytest.mark.usefixtures("traced_backward")

KINDS = {
    "clipped by the optimizer": {"model": partial(Transformer, blocks=2)},
    "clipped by hand": {"clips_by_hand": True},
    "not clipped": {"max_grad_norm": None},
    "fp16": {"autocast": torch.float16},
    "bf16 parameters": {"half": True},
    "bf16 parameters with remainders": {"half": True, "master_weights": "remainder"},
    "linear loss": {"model": partial(Transformer, linear_loss=True)},
    "checkpointed": {"model": partial(Transformer, checkpointing=True)},
}
EVERY_KIND = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
# Inductor takes 7 s for each kind. Other kinds differ only by operators that these kinds have too.
COMPILED = ["clipped by the optimizer", "fp16", "bf16 parameters with remainders", "linear loss"]

CALLS = ["fused_adam", "multi_tensor_norm", "multi_tensor_unscale_norm", "update_scale"]


@EVERY_KIND
def test_steps_in_a_single_graph_equal_eager_steps_bit_by_bit(device, options):
    twins = Twins(device, **options)
    for seed in range(6):
        losses = twins.step(seed)
        assert_same_bits(losses[:1], losses[1:])
        twins.assert_same()
    assert twins.counter.frame_count == 1


@pytest.mark.parametrize(
    ("options", "more"),
    [({}, []), ({"clips_by_hand": True}, ["multi_tensor_clip", "multi_tensor_norm"])],
    ids=["clipped by the optimizer", "clipped by hand"],
)
def test_graph_calls_exactly_the_expected_operators(device, options, more):
    twins = Twins(device, **options)
    twins.step(0)
    assert twins.operators == sorted(["cross_entropy", *CALLS, *more])


def test_overflow_skips_the_step_and_moves_the_scale_in_the_graph(device):
    twins = Twins(device)
    scales = []
    for seed in range(8):
        for side in twins.sides:
            side.factor.fill_(float("inf") if seed in (2, 3, 6) else 1.0)
        twins.step(seed)
        twins.assert_same()
        scales.append(twins.compiled.scaler.get_scale())
        reports = [side.scaler.overflow_report(side.model) for side in twins.sides]
        assert reports[0] == (reports[1] if seed in (2, 3, 6) else [])
    assert scales == [4, 8, 4, 2, 2, 4, 2, 2]
    histories = [side.scaler.history() for side in twins.sides]
    assert [record.skipped for record in histories[0]] == [s in (2, 3, 6) for s in range(8)]
    assert_same_bits(*([torch.tensor(history)] for history in histories))
    assert twins.counter.frame_count == 1


def test_learning_rate_in_a_tensor_changes_without_another_graph(device):
    twins = Twins(device)
    for seed, lr in enumerate((1e-2, 1e-3, 0.0, 0.1)):
        for side in twins.sides:
            side.lr.fill_(lr)
        twins.step(seed)
        twins.assert_same()
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


def test_batches_of_other_shapes_train_as_in_eager_steps(device):
    twins = Twins(device)
    for seed, rows in enumerate((4, 3, 7, 5)):
        twins.step(seed, rows)
        twins.assert_same()


@pytest.mark.parametrize("way", ["by the optimizer", "by a list", "by the model"])
def test_gradients_may_be_reset_in_any_way(device, way):
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


def test_eager_and_compiled_steps_may_alternate(device):
    twins = Twins(device)
    for seed in range(6):
        inputs = batch(device, seed)
        step = twins.compiled.step if seed % 3 == 1 else twins.compiled_step
        step(*inputs)
        twins.eager.step(*inputs)
        twins.assert_same()


def test_states_load_from_eager_training_into_the_graph_and_back(device):
    twins = Twins(device, half=True)
    for seed in range(3):
        twins.step(seed)
    for ours, theirs in (("compiled", "eager"), ("eager", "compiled")):
        saved = getattr(twins, theirs)
        for name in ("model", "optimizer", "scaler"):
            state = getattr(saved, name).state_dict()
            getattr(getattr(twins, ours), name).load_state_dict(state)
        twins.step(4)
        twins.assert_same()
    assert twins.counter.frame_count == 1


def test_gradients_of_several_batches_accumulate_in_one_graph(device):
    twins = Twins(device, batches=2)
    for seed in range(4):
        twins.step(seed)
        twins.assert_same()
    assert twins.counter.frame_count == 1


@pytest.mark.parametrize("options", [KINDS[kind] for kind in COMPILED], ids=COMPILED)
def test_inductor_makes_no_copies_and_its_losses_match_eager_ones(device, options, missed_copies):
    # One block instead of two saves half of the compile time, which is most of this file's time.
    model = partial(options.get("model", Transformer), blocks=1)
    twins = Twins(device, "inductor", **{**options, "model": model})
    losses = torch.stack([torch.stack(twins.step(seed % 2)) for seed in range(12)])
    assert missed_copies.get_total_missed_bytes() == 0
    assert twins.counter.frame_count == 1
    assert losses[-1, 0] < losses[0, 0] - 0.5
    torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=0.02, atol=0.02)


def test_training_is_unchanged_if_the_graph_breaks_at_backward(device):
    sides = [Training(device), Training(device)]
    with torch._dynamo.config.patch(trace_autograd_ops=False):
        compiled = torch.compile(sides[0].step, backend="aot_eager")
        for seed in range(4):
            inputs = batch(device, seed)
            assert_same_bits([compiled(*inputs)], [sides[1].step(*inputs)])
    assert_same_bits(*(side.model.parameters() for side in sides))
    assert sides[0].scaler.state_dict() == sides[1].scaler.state_dict()


def test_patched_program_compiles_to_a_single_graph(device):
    """The program calls torch's functions; its graph contains ampfuse's operators."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    with ampfuse.patched():
        model = torch.nn.Linear(8, 5, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        criterion = torch.nn.CrossEntropyLoss()

        @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=keep))
        def step(inputs, target):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = criterion(model(inputs), target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        inputs = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(device)
        target = torch.arange(6, device=device) % 5
        losses = [step(inputs, target).item() for _ in range(30)]

    assert losses[-1] < losses[0] - 0.2
    (graph,) = graphs
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    # An operator that writes its arguments is not the target of its node but the first argument.
    operators = {str(what) for node in calls for what in (node.target, *node.args[:1])}
    assert operators >= {
        f"ampfuse.{name}.default"
        for name in (
            "cross_entropy_forward",
            "cross_entropy_backward",
            "multi_tensor_unscale_norm",
            "multi_tensor_clip",
            "fused_adam",
            "update_scale",
        )
    }


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
