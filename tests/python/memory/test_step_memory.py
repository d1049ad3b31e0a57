"""The memory after steps, what counts as growth, and the look for its cause."""

import pytest
import torch
from ampfuse.memory import _step_memory
from ampfuse.memory._growth import Look
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


def test_look_may_begin_inside_a_module_with_hooks():
    class Trainer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch):
            self.layer(batch).sum().backward()
            optimizer.step()

    trainer = Trainer()
    trainer.register_forward_hook(lambda *_: None)
    optimizer = torch.optim.SGD(trainer.parameters())
    look = []
    optimizer.register_step_post_hook(lambda *_: look.append(Look()) if not look else None)
    trainer(torch.ones(2, 4))
    assert look[0].stop()
