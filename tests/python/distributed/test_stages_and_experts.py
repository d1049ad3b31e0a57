"""Stages of a pipeline, and experts, which four ranks share, train as in one process.

Scaler and optimizer of ranks that hold other parameters get the group of these ranks.
"""

from contextlib import nullcontext

import ampfuse
import distributed_steps as steps
import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from processes import Scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)
MICRO_BATCHES = 3
# Two copies of a pipeline (1F1B) of two stages. The copies of a stage are replicas, or shards of
# one. Only the last stage has a loss to scale.
KINDS, STAGES = ("replicas", "shards"), ("first stage", "last stage")
PIPELINES = [(kind, overflowing) for kind in KINDS for overflowing in STAGES]
OF_ALL = ("norms", "scales", "skipped")  # results that all ranks share


def stages_and_copies():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "copies"))


@scenario(*PIPELINES)
def overflow_in_stage(case):
    """Train; in one step a gradient overflows in one stage, and those of the other are finite."""
    kind, overflowing = case
    mesh = stages_and_copies()
    stage_index, copy_index = mesh.get_local_rank("stages"), mesh.get_local_rank("copies")
    group = mesh["stages"].get_group()
    network = steps.model()
    part = network[:2] if stage_index == 0 else network[2:]
    if kind == "shards":
        fully_shard(part, mesh=mesh["copies"])
    optimizer = steps.adamw(part.parameters(), process_group=group)
    scaler = ampfuse.GradScaler("cpu", steps.SCALE, process_group=group)

    def scaled_loss(outputs, targets):
        return scaler.scale((outputs - targets).square().mean())

    stage = PipelineStage(part, stage_index, 2, "cpu", group=group)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=scaled_loss)

    is_overflowing = stage_index == STAGES.index(overflowing)
    if kind == "shards":
        is_overflowing = is_overflowing and copy_index == 1

    def set_gradients(step):
        inputs, targets = steps.batch(copy_index if kind == "shards" else 0, step)
        schedule.step(inputs) if stage_index == 0 else schedule.step(target=targets)
        if step == steps.OVERFLOWING and is_overflowing:
            steps.overflow(part.parameters())

    return steps.train(optimizer, scaler, set_gradients)


@steps.each(PIPELINES)
def test_stages_of_a_pipeline_step_clip_and_skip_as_one_process(case):
    kind, _ = case
    results = scenario.results("overflow_in_stage", case)
    for first, last in (results[0::2], results[1::2]):
        expected = steps.alone(ranks=2 if kind == "shards" else 1)
        for name in expected.keys() - OF_ALL:
            first[name] += last[name]
        steps.assert_like(first, expected, tolerance=1e-5)
        for name in OF_ALL:
            assert last[name] == first[name]


@on_ranks(scenario, "all ranks", "stages")
def test_process_group_of_ranks_that_share_dtensors_is_refused(kind):
    # Norms of DTensors cover all shards, so such a group would count them once for each rank.
    mesh = stages_and_copies()
    network = steps.model()
    fully_shard(network, mesh=mesh["copies"])
    group = dist.group.WORLD if kind == "all ranks" else mesh["stages"].get_group()
    message = "process_group: expected ranks that step other parameters, got ranks that hold"
    refused = pytest.raises(ValueError, match=message)
    with refused if kind == "all ranks" else nullcontext():
        steps.adamw(network.parameters(), process_group=group)


# Experts of two layers. Two data parallel copies of two ranks share them, and each rank has one of
# each layer. For each step the pairs of layer and expert that get gradients:
USED = [
    {(0, 0), (1, 0), (1, 1)},
    {(0, 0), (0, 1), (1, 1)},
    {(1, 1)},
    {(0, 0), (0, 1), (1, 0), (1, 1)},
]
PAIRS = [(layer, expert) for layer in range(2) for expert in range(2)]
# How the layer that is not one of experts is held, how experts are, and what clips. The layer is
# sharded over all four ranks, or replicated.
EXPERTS = [
    ("sharded layer", "DTensors", "clipped in the step"),
    ("replicated layer", "DTensors", "clipped in the step"),
    ("no layer", "plain tensors", "clipped in the step"),
    ("sharded layer", "DTensors", "clipped by ampfuse"),
    ("replicated layer", "DTensors", "clipped by ampfuse"),
    ("replicated layer", "DTensors", "clipped by the scaler"),
]


def numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient(layer, expert, step, scale):
    """Return the scaled gradient of an expert. Expert 1 of layer 1 overflows in one step."""
    grad = numbers((4, 3), 100 + 10 * step + 2 * layer + expert) * scale
    if step == steps.OVERFLOWING and (layer, expert) == (1, 1):
        grad[0, 0] = torch.inf
    return grad


def train_experts(layer_kind, pairs, *, of_layer, of_expert, group=None, clip=None):
    """Train these experts, and the layer. The functions make tensors of a rank from whole ones."""
    layers = [] if layer_kind == "no layer" else [Parameter(of_layer(numbers((8, 5), 50)))]
    experts = [Parameter(of_expert(numbers((4, 3), 2 * layer + one))) for layer, one in pairs]
    optimizer = steps.adamw([*layers, *experts], clip, process_group=group)
    scaler = ampfuse.GradScaler("cpu", steps.SCALE, process_group=group)
    scaler.scale_tensor()

    def set_gradients(step):
        scale = scaler.get_scale()
        for param in layers:
            param.grad = of_layer(numbers((8, 5), 200 + step) * scale)
        for pair, param in zip(pairs, experts, strict=True):
            if pair in USED[step]:
                param.grad = of_expert(gradient(*pair, step, scale))

    return steps.train(optimizer, scaler, set_gradients, clip)


@scenario(*EXPERTS)
def experts_of_ranks(case):
    layer_kind, kind, clip = case
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    every = init_device_mesh("cpu", (4,))
    of_experts, expert = mesh["experts"], mesh.get_local_rank("experts")

    def of_layer(tensor):
        is_sharded = layer_kind == "sharded layer"
        return distribute_tensor(tensor, every, [Shard(0)]) if is_sharded else tensor

    def of_expert(tensor):
        is_plain = kind == "plain tensors"
        return tensor if is_plain else DTensor.from_local(tensor[None], of_experts, [Shard(0)])

    result = train_experts(
        layer_kind,
        [(layer, expert) for layer in range(2)],
        of_layer=of_layer,
        of_expert=of_expert,
        group=of_experts.get_group() if kind == "plain tensors" else None,
        clip=steps.CLIPS[clip],
    )
    return result | {"expert": expert}


def as_on_one_rank(tensors, expert, *, are_whole):
    """Return what a rank has of the tensors of all experts of both layers, or DTensors of them."""
    *of_layer, first, second, third, last = tensors
    pairs = (first, second), (third, last)
    return [*of_layer, *(torch.stack(pair) if are_whole else pair[expert] for pair in pairs)]


@steps.each(EXPERTS)
def test_experts_without_gradients_on_some_ranks_step_clip_and_skip_as_in_one_process(case):
    layer_kind, kind, _ = case
    same = torch.Tensor.clone
    of_one_process = train_experts(layer_kind, PAIRS, of_layer=same, of_expert=same)
    for result in scenario.results("experts_of_ranks", case):
        expected = dict(of_one_process)
        for name in expected.keys() - OF_ALL:
            are_whole = kind == "DTensors" and name != "step"
            expected[name] = as_on_one_rank(expected[name], result["expert"], are_whole=are_whole)
        steps.assert_like(result, expected, tolerance=1e-5)
