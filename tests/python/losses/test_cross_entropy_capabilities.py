"""Tests of the losses on CPUs without vector instructions that ampfuse supports."""

import os
import subprocess
import sys
from pathlib import Path

import ampfuse
import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_losses_pass_their_tests_without_vector_instructions():
    if ampfuse.build_info()["cpu_capability"] == "DEFAULT":
        pytest.skip("there is nothing less here")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    names = ["test_cross_entropy", "test_cross_entropy_autograd", "test_cross_entropy_positions"]
    names += ["test_linear_cross_entropy", "test_linear_cross_entropy_accuracy"]
    files = [TESTS / f"{name}.py" for name in names]
    result = subprocess.run(
        [*command, *files, "-k", "cpu and not compiled"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
