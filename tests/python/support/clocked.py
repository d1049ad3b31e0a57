"""A small training loop, and the steps that a clock measures in it."""

from contextlib import ExitStack, contextmanager

import ampfuse
import torch
from ampfuse.tools.diagnosis.clock import StepClock
from ampfuse.tools.diagnosis.phases import BACKWARD, EVALUATION, PHASES, Listener
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Steps(Listener):
    """Keeps the seconds of each step, and the order of the phases."""

    is_live = True

    def __init__(self):
        self.steps, self.numbers, self.phases, self.backwards = [], [], [], 0

    def noted(self, phase, begins):
        self.backwards += begins and phase == BACKWARD

    def read(self, intervals):
        self.phases += [phase for phase, _ in intervals]

    def step_ends(self, optimizer, step, seconds):
        if not seconds:
            return
        self.numbers.append(step)
        self.steps.append({phase: seconds.get(phase, 0.0) for phase in (*PHASES, EVALUATION)})


@contextmanager
def clocked():
    """Yield steps that a clock measures until the block ends."""
    with ExitStack() as exits:
        made = Steps()
        made.clock = StepClock(exits, made)
        yield made


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.zeros(4)


def train(after=lambda: None, loader=None):
    model = nn.Linear(4, 4)
    optimizer = ampfuse.AdamW(model.parameters())
    for batch in DataLoader(Numbers(), 4) if loader is None else loader:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
