"""The processes in which programs are tried."""

import subprocess
from types import SimpleNamespace
from unittest import mock

import pytest
import warm
from ampfuse.tools.precision import advisor


@pytest.fixture(scope="session", autouse=True)
def warm_processes():
    """Let a trial run a program in a process that need not import torch."""
    functions = SimpleNamespace(run=warm.run, DEVNULL=subprocess.DEVNULL)
    with mock.patch.object(advisor, "subprocess", functions):
        yield
