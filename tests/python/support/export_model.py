"""A model that returns both losses, and its export."""

import ampfuse
import torch
from torch import Tensor, nn


class Scored(nn.Module):
    """A model that returns the losses of two last layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 16, dtype=dtype)
        self.head = nn.Linear(16, 11, dtype=dtype)
        self.criterion = ampfuse.CrossEntropyLoss(label_smoothing=0.1)
        self.linear_criterion = ampfuse.LinearCrossEntropyLoss(16, 11, dtype=dtype)
        self.requires_grad_(False)

    def forward(self, features: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.layer(features))
        return self.criterion(self.head(hidden), target), self.linear_criterion(hidden, target)


def batch(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the batch that the C++ program makes, too."""
    features = torch.linspace(-2, 2, rows * 8).reshape(rows, 8).to(dtype)
    return features, torch.arange(rows) * 7 % 11


def exported(model: Scored) -> torch.export.ExportedProgram:
    """Export the model for any number of rows from 2 to 64."""
    rows = torch.export.Dim("rows", min=2, max=64)
    dtype = model.head.weight.dtype
    return torch.export.export(model, batch(6, dtype), dynamic_shapes=({0: rows}, {0: rows}))
