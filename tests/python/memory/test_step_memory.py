"""The memory after steps, and what counts as growth."""

import pytest
import torch
from ampfuse.memory import _step_memory
from ampfuse.memory._step_memory import slope
from torch import nn


def test_samples_after_steps_have_their_numbers_when_some_are_left_out(monkeypatch):
    monkeypatch.setattr(_step_memory, "LEAST_SPACING", 0)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    memory = _step_memory.StepMemory()
    for steps in (1, 2, 500, 501):
        memory.end_step(optimizer, steps)
    assert [end.step for end in memory.ends] == [0, 1, 499, 500]
    assert memory.steps == 501


@pytest.mark.parametrize(
    ("sizes", "growth"),
    [
        (range(0, 40 * 2**20, 2**20), 2**20),
        ([5 * 2**20] * 40, None),
        (range(40 * 2**20, 0, -(2**20)), None),
        (range(0, 40 * 100, 100), None),  # too little
        ([2**22 * (i % 2) for i in range(40)], None),  # up and down
    ],
)
def test_growth_is_steady_and_large(sizes, growth):
    assert slope(list(range(40)), list(sizes)) == growth
