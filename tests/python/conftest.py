"""Where tests run: a test that takes `device` runs on the CPU, and on a GPU where there is one.

FAIL_WITHOUT_CUDA=1 makes the GPU half fail instead of being skipped, so that a job that was meant
to have a GPU can't pass without it.
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

# Where tests/cpp/python_classes is built.
BUILD = Path(__file__).parents[2] / os.environ.get("AMPFUSE_BUILD", "build")
sys.path.append(str(BUILD / "tests" / "cpp"))


def _why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if not ampfuse.has_cuda():
        return "this build of ampfuse has no CUDA kernels"
    return None


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
    """`float32` in a test's name, where pytest would number the dtypes."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


# Of the session, because hypothesis refuses fixtures that it would have to renew per example.
@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads, undone behind the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def waits_are_errors() -> Iterator[Callable[[], None]]:
    """A function that makes torch raise where the host would wait, until the test is over."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile as if nothing had been compiled yet, and nothing left of what is."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def missed_copies(fresh_compiler: None) -> Iterator[Any]:
    """Counters of what could have been written in place, and was copied.

    The compiler compiles all: what it finds in a cache it does not look at for that.
    """
    from torch._dynamo.utils import ReinplaceCounters

    ReinplaceCounters.clear()  # type: ignore[no-untyped-call]
    with torch._inductor.config.patch(force_disable_caches=True):
        yield ReinplaceCounters


@pytest.fixture
def traced_backward(fresh_compiler: None) -> Iterator[None]:
    """The same, and backward passes are part of graphs."""
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


@pytest.fixture(params=["as it is", "captured"])
def graphs_on_cpu(
    request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> pytest.MonkeyPatch | None:
    """Whether graphs are made on a CPU, too, where a replay is the step itself."""
    if request.param == "as it is":
        return None
    if device.type == "cuda":
        pytest.skip("a GPU has graphs")
    return monkeypatch


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """A folder for programs of the test's."""
    return Programs(tmp_path)
