"""A model with losses of ampfuse, exported, compiled ahead of time, and run without Python."""

import pytest
import torch
from export_model import Scored, batch, exported
from packaging_tools import build_program, environment, run
from torch.testing import assert_close

MAIN = """
#include <ampfuse/ampfuse.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <iostream>
#include <string>

constexpr int ROWS = 9;

int main(int, char** arguments) {
  c10::InferenceMode inference;
  // Whose operators the package calls: used, so that it is linked and loaded.
  std::cout << ampfuse::build_info().version << std::endl;
  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  const auto dtype = std::string(arguments[2]) == "float32" ? torch::kFloat : torch::kBFloat16;
  const torch::Tensor features = torch::linspace(-2, 2, ROWS * 8).reshape({ROWS, 8}).to(dtype);
  const torch::Tensor target = torch::arange(ROWS) * 7 % 11;
  for (const torch::Tensor& loss : model.run({features, target})) {
    std::cout << loss.scalar_type() << " " << loss.item<float>() << std::endl;
  }
}
"""

CMAKE = """
cmake_minimum_required(VERSION 3.21)
project(score CXX)
find_package(ampfuse REQUIRED)
add_executable(score main.cpp)
target_link_libraries(score PRIVATE ampfuse::ampfuse)
"""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@DTYPES
def test_exported_program_calls_the_ops_and_gives_the_same_losses(dtype):
    model, (hidden, target) = Scored(dtype), batch(6, dtype)
    program = exported(model)
    called = {str(node.target) for node in program.graph.nodes}
    assert {"ampfuse.cross_entropy.default", "ampfuse.linear_cross_entropy.default"} <= called
    for rows in (2, 6, 9):
        hidden, target = batch(rows, dtype)
        assert_close(program.module()(hidden, target), model(hidden, target), rtol=0, atol=0)


@pytest.fixture(scope="module")
def score(tmp_path_factory):
    """The C++ program."""
    folder = tmp_path_factory.mktemp("score")
    (folder / "main.cpp").write_text(MAIN)
    (folder / "CMakeLists.txt").write_text(CMAKE)
    build_program(folder, folder / "build")
    return folder / "build" / "score"


@pytest.mark.slow
@DTYPES
def test_package_runs_in_python_and_in_a_cpp_program(score, tmp_path, dtype):
    model = Scored(dtype)
    package = str(tmp_path / "model.pt2")
    torch._inductor.aoti_compile_and_package(exported(model), package_path=package)
    loaded = torch._inductor.aoti_load_package(package)
    for rows in (2, 6, 9):
        inputs = batch(rows, dtype)
        expected = model(*inputs)
        for loss, right in zip(loaded(*inputs), expected, strict=True):
            assert loss.dtype == torch.float32
            assert_close(loss, right, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)

    name = str(dtype).removeprefix("torch.")
    printed = run(score, package, name, env=environment())
    losses = [line.split() for line in printed.splitlines()[1:]]
    assert [dtype for dtype, _ in losses] == ["Float", "Float"]
    for (_, loss), right in zip(losses, expected, strict=True):
        assert float(loss) == pytest.approx(right.item(), rel=1e-2)
