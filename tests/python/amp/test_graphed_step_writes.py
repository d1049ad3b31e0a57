"""Writes of other code to the parameters of an ampfuse.GraphedStep."""

import warnings

import ampfuse
import pytest
import torch
from graphed_models import Side, batch
from optim_models import assert_same_bits


@pytest.mark.parametrize("write", ["no_grad", "data"])
def test_parameters_written_between_replays_keep_the_written_values(device, graphs_on_cpu, write):
    side = Side(device, half=True, monkeypatch=graphs_on_cpu)
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(*batch(device, 2))

    assert_same_bits([param.detach() for param in params], values)


@pytest.mark.parametrize("remainders_first", [False, True])
def test_writes_between_replays_leave_the_remainders_of_other_groups_as_they_are(
    device, graphs_on_cpu, remainders_first
):
    def side(**arguments):
        side = Side(device, half=True, **arguments)
        kinds = [True, "remainder"]
        groups = zip(
            (side.model.layers[0], side.model.layers[4]),
            reversed(kinds) if remainders_first else kinds,
            strict=True,
        )
        side.optimizer = ampfuse.AdamW(
            [{"params": layer.parameters(), "master_weights": kind} for layer, kind in groups],
            lr=1e-2,
        )
        return side

    ours, eager = side(monkeypatch=graphs_on_cpu), side()
    step = ours.graphed()
    for seed in (1, 2):
        for each, take in ((ours, step), (eager, eager.step)):
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                take(*batch(device, seed))
            with torch.no_grad():
                for layer in (0, 4):
                    each.model.layers[layer].bias.fill_(0.25)

    ours.assert_same(eager)
