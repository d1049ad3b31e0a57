"""An optimizer of another package inside of `ampfuse.Mastered`, with modes of its own."""

import ampfuse
import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch.nn import Parameter


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_and_modes_are_those_of_a_float32_run(dtype):
    torch.manual_seed(0)
    start = torch.randn(5, 7).bfloat16()
    param, reference = Parameter(start.to(dtype, copy=True)), Parameter(start.float())
    optimizer = ampfuse.Mastered(lambda groups: AdamWScheduleFree(groups, lr=0.1), [param])
    plain = AdamWScheduleFree([reference], lr=0.1)
    scaler = ampfuse.GradScaler("cpu", init_scale=1024.0)
    for epoch in range(2):
        optimizer.inner.train()
        plain.train()
        optimizer.sync_model_from_masters()
        for step in range(3):
            torch.manual_seed(3 * epoch + step)
            reference.grad = torch.randn(5, 7).bfloat16().float()
            scaler.scale(torch.zeros(()))
            param.grad = (reference.grad * scaler.get_scale()).to(dtype)
            scaler.step(optimizer)
            scaler.update()
            plain.step()
            (master,) = optimizer.master_params()
            assert torch.equal(master, reference)
        optimizer.inner.eval()
        plain.eval()
        optimizer.sync_model_from_masters()
        assert torch.equal(param, reference.to(dtype))
