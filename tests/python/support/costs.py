"""A pytest plugin that records what each test spends its time on, as properties in the report.

`tools/test_times.py` makes tables of the reports. `processes` is the number of processes that a
test started; `compiling` is the time in seconds that torch.compile took, except in fixtures.
"""

import multiprocessing.process
import sys
from collections.abc import Iterator
from typing import Any

import pytest

# The passes forward and backward; the compiler's own names.
_COMPILING = ("_compile.compile_inner", "compile_fx.<locals>.bw_compiler")
_processes = 0


def _count_start(event: str, _: Any) -> None:
    global _processes
    if event in ("subprocess.Popen", "os.fork"):
        _processes += 1


def _counted(start: Any) -> Any:
    def replacement(process: Any) -> None:
        global _processes
        _processes += 1
        start(process)

    return replacement


def pytest_configure(config: pytest.Config) -> None:
    """Count processes from now on. Processes of a fork server raise no audit event here."""
    sys.addaudithook(_count_start)
    base = multiprocessing.process.BaseProcess
    base.start = _counted(base.start)  # type: ignore[method-assign]


def _compile_times() -> dict[str, list[float]]:
    # A test may have replaced the module by another object.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return getattr(dynamo, "compilation_time_metrics", {})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count processes that the test and its fixtures start."""
    item.stash[_BEFORE] = _processes
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Measure compilations by the test. Fixtures reset the compiler's times after it."""
    for name in _COMPILING:
        _compile_times().pop(name, None)
    try:
        return (yield)
    finally:
        seconds = sum(sum(_compile_times().get(name, ())) for name in _COMPILING)
        if seconds > 0:
            item.user_properties.append(("compiling", round(seconds, 2)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    if _processes > item.stash[_BEFORE]:
        item.user_properties.append(("processes", _processes - item.stash[_BEFORE]))
    return result


_BEFORE = pytest.StashKey[int]()
