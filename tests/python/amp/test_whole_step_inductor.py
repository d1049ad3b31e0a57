"""Whole steps that inductor compiles, and those of patched programs."""

from functools import partial

import ampfuse
import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from whole_step import Transformer, Twins

pytestmark = pytest.mark.usefixtures("traced_backward")

# These two have all operators of test_whole_step_compile.py. Inductor takes seconds for each.
COMPILED = {
    "clipped by the optimizer": {},
    "linear loss and remainders": {
        "model": partial(Transformer, linear_loss=True),
        "half": True,
        "master_weights": "remainder",
    },
}


@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_inductor_makes_no_copies_and_its_losses_match_eager_ones(device, options, missed_copies):
    twins = Twins(device, "inductor", **options)
    losses = torch.stack([torch.stack(twins.step(seed % 2)) for seed in range(12)])
    assert missed_copies.get_total_missed_bytes() == 0
    assert twins.counter.frame_count == 1
    assert losses[-1, 0] < losses[0, 0] - 0.5
    torch.testing.assert_close(losses[:, 0], losses[:, 1], rtol=0.02, atol=0.02)


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
    for name in (
        "cross_entropy_forward",
        "cross_entropy_backward",
        "multi_tensor_unscale_norm",
        "multi_tensor_clip",
        "fused_adam",
        "update_scale",
    ):
        assert f"ampfuse.{name}.default" in graph.code
