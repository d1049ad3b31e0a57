"""A model with losses of ampfuse, exported, compiled ahead of time, and run without Python."""

import ampfuse
import pytest
import torch
from packaging_tools import PROGRAMS, ROOT, build_program, environment, run
from torch import nn
from torch.testing import assert_close


class Scored(nn.Module):
    """A model that returns the losses of two last layers."""

    def __init__(self, dtype):
        super().__init__()
        self.layer = nn.Linear(8, 16, dtype=dtype)
        self.head = nn.Linear(16, 11, dtype=dtype)
        self.criterion = ampfuse.CrossEntropyLoss(label_smoothing=0.1)
        self.linear_criterion = ampfuse.LinearCrossEntropyLoss(16, 11, dtype=dtype)

    def forward(self, features, target):
        hidden = torch.relu(self.layer(features))
        return self.criterion(self.head(hidden), target), self.linear_criterion(hidden, target)


class Both(nn.Module):
    """Such a model in float32 and in bfloat16, to export and compile them at once."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.single, self.narrow = Scored(torch.float32), Scored(torch.bfloat16)
        self.requires_grad_(False)

    def forward(self, features, target):
        losses = self.single(features, target) + self.narrow(features.bfloat16(), target)
        return list(losses)


TOLERANCES = [1e-5, 1e-5, 1e-2, 1e-2]


def batch(rows):
    """Return the batch that the C++ program makes, too."""
    return torch.linspace(-2, 2, rows * 8).reshape(rows, 8), torch.arange(rows) * 7 % 11


@pytest.fixture(scope="module")
def exported():
    """Return a model, and its export for any number of rows from 2 to 64."""
    rows, model = torch.export.Dim("rows", min=2, max=64), Both()
    return model, torch.export.export(model, batch(6), dynamic_shapes=({0: rows}, {0: rows}))


def test_exported_program_calls_the_ops_and_gives_the_same_losses(exported):
    model, program = exported
    called = {str(node.target) for node in program.graph.nodes}
    assert {"ampfuse.cross_entropy.default", "ampfuse.linear_cross_entropy.default"} <= called
    for rows in (2, 6, 9):
        assert_close(program.module()(*batch(rows)), model(*batch(rows)), rtol=0, atol=0)


@pytest.mark.slow
def test_package_runs_in_python_and_in_a_cpp_program(exported, tmp_path):
    model, program = exported
    package = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package)
    loaded = torch._inductor.aoti_load_package(package)
    for rows in (2, 6, 9):
        expected = model(*batch(rows))
        for loss, right, rtol in zip(loaded(*batch(rows)), expected, TOLERANCES, strict=True):
            assert loss.dtype == torch.float32
            assert_close(loss, right, rtol=rtol, atol=0)

    # The program stays in the build folder between runs, so only the first run compiles it.
    build = PROGRAMS / "exported_model"
    build_program(ROOT / "tests" / "cpp" / "exported_model", build)
    printed = run(build / "exported_model", package, env=environment())
    losses = [line.split() for line in printed.splitlines()[1:]]
    assert [dtype for dtype, _ in losses] == ["Float"] * 4
    for (_, loss), right in zip(losses, expected, strict=True):
        assert float(loss) == pytest.approx(right.item(), rel=1e-2)
