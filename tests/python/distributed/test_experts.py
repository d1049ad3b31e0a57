"""Experts of two layers, one on each of two ranks, of which some get no gradients in some steps.

Four ranks are two data parallel copies of two ranks that share the experts. A layer that is not
one of experts is sharded over all four, or replicated.
"""

import ampfuse
import pytest
import torch
from distributed_steps import (
    CLIPS,
    OVERFLOWING,
    SCALE,
    adamw,
    assert_like,
    each,
    train,
)
from processes import Scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

pytestmark = pytest.mark.slow
scenario = Scenarios(ranks=4)

# For each step the pairs of layer and expert that get gradients.
USED = [
    {(0, 0), (1, 0), (1, 1)},
    {(0, 0), (0, 1), (1, 1)},
    {(1, 1)},
    {(0, 0), (0, 1), (1, 0), (1, 1)},
]


@pytest.fixture(scope="module", autouse=True)
def played(tmp_path_factory):
    scenario.play(tmp_path_factory.mktemp("processes"))


def numbers(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient(layer, expert, step, scale):
    """Return the scaled gradient of an expert. Expert 1 of layer 1 overflows in one step."""
    grad = numbers((4, 3), 100 + 10 * step + 2 * layer + expert) * scale
    if step == OVERFLOWING and (layer, expert) == (1, 1):
        grad[0, 0] = torch.inf
    return grad


def layer_gradient(step, scale):
    return numbers((8, 5), 200 + step) * scale


def trained(params, set_gradients, *, group=None, clip=None):
    optimizer = adamw(params, clip, process_group=group)
    scaler = ampfuse.GradScaler("cpu", SCALE, process_group=group)
    scaler.scale_tensor()
    return train(optimizer, scaler, lambda step: set_gradients(step, scaler.get_scale()), clip)


# How the layer that is not one of experts is held, how experts are, and what clips.
CASES = [
    ("sharded layer", "DTensors", "clipped in the step"),
    ("replicated layer", "DTensors", "clipped in the step"),
    ("no layer", "plain tensors", "clipped in the step"),
    ("sharded layer", "DTensors", "clipped by ampfuse"),
    ("replicated layer", "DTensors", "clipped by ampfuse"),
    ("replicated layer", "DTensors", "clipped by the scaler"),
]


@scenario(*CASES)
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

    layers = [] if layer_kind == "no layer" else [Parameter(of_layer(numbers((8, 5), 50)))]
    experts = [Parameter(of_expert(numbers((4, 3), 2 * layer + expert))) for layer in range(2)]

    def set_gradients(step, scale):
        for param in layers:
            param.grad = of_layer(layer_gradient(step, scale))
        for layer, param in enumerate(experts):
            if (layer, expert) in USED[step]:
                param.grad = of_expert(gradient(layer, expert, step, scale))

    group = of_experts.get_group() if kind == "plain tensors" else None
    result = trained([*layers, *experts], set_gradients, group=group, clip=CLIPS[clip])
    return result | {"expert": expert}


def trained_alone(layer_kind):
    """Train all experts in one process."""
    pairs = [(layer, expert) for layer in range(2) for expert in range(2)]
    layers = [] if layer_kind == "no layer" else [Parameter(numbers((8, 5), 50))]
    experts = [Parameter(numbers((4, 3), 2 * layer + expert)) for layer, expert in pairs]

    def set_gradients(step, scale):
        for param in layers:
            param.grad = layer_gradient(step, scale)
        for (layer, expert), param in zip(pairs, experts, strict=True):
            if (layer, expert) in USED[step]:
                param.grad = gradient(layer, expert, step, scale)

    return trained([*layers, *experts], set_gradients)


def as_on_one_rank(tensors, expert, *, are_whole):
    """Return what a rank has of the tensors of all experts of both layers, or DTensors of them."""
    *of_layer, first, second, third, last = tensors
    pairs = (first, second), (third, last)
    return [*of_layer, *(torch.stack(pair) if are_whole else pair[expert] for pair in pairs)]


@each(CASES)
def test_experts_without_gradients_on_some_ranks_step_clip_and_skip_as_in_one_process(case):
    layer_kind, kind, _ = case
    for result in scenario.results("experts_of_ranks", case):
        expected = trained_alone(layer_kind)
        for name in expected.keys() - {"norms", "scales", "skipped"}:
            are_whole = kind == "DTensors" and name != "step"
            expected[name] = as_on_one_rank(expected[name], result["expert"], are_whole=are_whole)
        assert_like(result, expected, tolerance=1e-5)
