"""A training with a scaler, for tests of mistakes in its use."""

import ampfuse
import pytest
import torch
from torch import nn

EVERY_SGD = pytest.mark.parametrize("make", [torch.optim.SGD, ampfuse.SGD])


class Training:
    """A small network, its optimizer and its scaler."""

    def __init__(self, device, make, criterion=None, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
        self.optimizer = make(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = ampfuse.GradScaler(device.type, **options)
        self.criterion = criterion or nn.CrossEntropyLoss()

    def loss(self):
        self.optimizer.zero_grad()
        device = self.model[0].weight.device
        inputs = torch.randn(32, 8).to(device)
        return self.criterion(self.model(inputs), torch.randint(4, (32,)).to(device))

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
