"""Gradients that a scaler meets twice, such as tied weights that a program lists per layer."""

import math

import ampfuse
import pytest
import torch

pytestmark = pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dupl")


@pytest.mark.parametrize("kind", ["twice", "view", "sparse"])
def test_gradients_that_share_memory_are_unscaled_as_in_torch(device, kind):
    def unscaled(scaler):
        embedding = torch.nn.Embedding(4, 1, sparse=kind == "sparse").to(device)
        torch.nn.init.ones_(embedding.weight)
        params, other = [embedding.weight] * 2, torch.nn.Parameter(torch.ones(4, device=device))
        loss = scaler.scale(embedding(torch.tensor([1, 2, 2], device=device)).sum())
        loss.backward()
        if kind == "view":
            params = [embedding.weight, other]
            other.grad = embedding.weight.grad.view(4)
        optimizer = torch.optim.SGD(params, lr=0.1)
        scaler.unscale_(optimizer)
        told = embedding.weight.grad.to_dense().flatten().tolist()
        scaler.step(optimizer)
        scaler.update()
        return told, embedding.weight.tolist(), scaler.get_scale()

    kinds = (torch.amp.GradScaler, ampfuse.GradScaler)
    torchs, ours = (unscaled(cls(device.type, init_scale=4.0)) for cls in kinds)
    assert ours == torchs


def test_overflow_report_names_a_parameter_that_is_listed_twice(device):
    once = torch.nn.Parameter(torch.ones(2, device=device))
    twice = torch.nn.Parameter(torch.ones(2, device=device))
    model = torch.nn.ParameterDict({"once": once, "twice": twice})
    optimizers = [torch.optim.SGD([once], lr=0.1), torch.optim.SGD([twice, twice], lr=0.1)]
    scaler = ampfuse.GradScaler(device.type, init_scale=4.0, history=3)
    for factors in ((math.inf, 1.0), (1.0, math.inf)):
        for param, factor, optimizer in zip((once, twice), factors, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale((param * factor).sum()).backward()
            scaler.step(optimizer)
        reports = scaler.overflow_report(model)
        scaler.update()
    assert reports == ["twice"]
    assert all(math.isnan(record.norm) for record in scaler.history())


def test_overflow_report_checks_each_gradient_that_shares_memory(device):
    memory = torch.tensor([1.0, math.inf], device=device)
    model = torch.nn.ParameterDict(
        {"part": torch.nn.Parameter(torch.ones(1)), "whole": torch.nn.Parameter(torch.ones(2))}
    ).to(device)
    model["part"].grad, model["whole"].grad = memory[:1], memory
    scaler = ampfuse.GradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert scaler.overflow_report(model) == ["whole"]
