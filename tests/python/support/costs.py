"""A pytest plugin that records what each test spends its time on, as properties in the report.

`tools/test_times.py` makes tables of the reports. `processes` is the number of processes that a
test started; `compiling` is the time in seconds that torch.compile took.
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


def _seconds_compiling() -> float:
    dynamo = sys.modules.get("torch._dynamo.utils")
    times = {} if dynamo is None else dynamo.compilation_time_metrics
    return sum(sum(times.get(name, ())) for name in _COMPILING)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = (_processes, _seconds_compiling())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    processes, seconds = item.stash[_BEFORE]
    if _processes > processes:
        item.user_properties.append(("processes", _processes - processes))
    if _seconds_compiling() > seconds:
        item.user_properties.append(("compiling", round(_seconds_compiling() - seconds, 2)))
    return result


_BEFORE = pytest.StashKey[tuple[int, float]]()
