"""Fixtures of all tests. A test that takes `device` runs on the CPU, and on a GPU if there is one.

FAIL_WITHOUT_CUDA=1 makes the GPU half fail instead of being skipped, so that a job that was meant
to have a GPU cannot pass without one.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ampfuse
import pytest
import torch
from programs import Programs

pytest_plugins = ("costs",)

# The build folder. Its tests/cpp has the module ampfuse_cpp, made from tests/cpp/python_classes.
BUILD = Path(__file__).parents[2] / os.environ.get("AMPFUSE_BUILD", "build")
sys.path.append(str(BUILD / "tests" / "cpp"))


def _why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if not ampfuse.has_cuda():
        return "this build of ampfuse has no CUDA kernels"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files with slow tests first: at the end, one process waits for the other's last file."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_cuda") is None:
        return
    reason = _why_no_cuda()
    if reason is None:
        return
    if os.environ.get("FAIL_WITHOUT_CUDA", "0") not in ("", "0"):
        pytest.fail(f"FAIL_WITHOUT_CUDA is set, but {reason}", pytrace=False)
    pytest.skip(reason)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Return the id of a dtype in test names: `float32`. pytest would number the dtypes."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


# The scope is the session: hypothesis refuses fixtures that it would have to renew per example.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Yield torch.set_num_threads, and restore the number of threads after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def waits_are_errors() -> Iterator[Callable[[], None]]:
    """Yield a function that makes torch raise if the host waits for the GPU during the test."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Delete everything that torch.compile has compiled, before and after the test."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def missed_copies(fresh_compiler: None) -> Iterator[Any]:
    """Yield the compiler's counters of tensors that it copied instead of writing in place.

    The compiler's caches are off, because it counts no copies in a graph that a cache returns.
    """
    from torch._dynamo.utils import ReinplaceCounters

    ReinplaceCounters.clear()  # type: ignore[no-untyped-call]
    with torch._inductor.config.patch(force_disable_caches=True):
        yield ReinplaceCounters


@pytest.fixture
def traced_backward(fresh_compiler: None) -> Iterator[None]:
    """Set up `fresh_compiler`, and make the compiler trace backward passes into its graphs."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    # Such a graph of torch 2.13 or 2.14 gives its name of a gradient to the one object for all None
    # of the compiler, and later graphs would look for it.
    constants = torch._dynamo.variables.constant
    if hasattr(constants, "CONSTANT_VARIABLE_NONE"):
        constants.CONSTANT_VARIABLE_NONE.source = None


@pytest.fixture(params=["as it is", "captured"])
def graphs_on_cpu(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> pytest.MonkeyPatch | None:
    """Return `monkeypatch` for tests that use fake graphs on the CPU, otherwise None.

    A replay of a fake graph runs the step itself.
    """
    if request.param == "as it is":
        return None
    if device.type == "cuda":
        pytest.skip("a GPU has graphs")
    return monkeypatch


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """Return a temporary folder for the programs that a test writes and runs."""
    return Programs(tmp_path)
