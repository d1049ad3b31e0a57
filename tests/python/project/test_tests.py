"""The tools of the tests: warm processes, the list of planted faults, and the report of times."""

import subprocess
import sys

import pytest
import test_times
import warm
from packaging_tools import ROOT
from plant import FAULTS

SUPPORT = ROOT / "tests" / "python" / "support"
PROGRAMS = {
    "argv": ["see.py", "--lr", "1", "-m"],
    "module": ["-m", "pack", "x"],
    "text": ["-c", "import sys; print(sys.argv, sys.path[0], __name__)", "a"],
    "exit code": ["-c", "import sys; sys.exit(7)"],
    "exit message": ["-c", "import sys; sys.exit('gone')"],
    "exception": ["-c", "def f(x):\n    return 1 / x\n\nf(0)"],
    "at exit": ["-c", "import atexit\natexit.register(print, 'bye')\nraise OSError('x')"],
    "environment": ["-c", "import os; print(os.environ['ANSWER'], os.getcwd())"],
    "killed": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "hard end": ["-c", "import os; print('now', flush=True); os._exit(5)"],
}


@pytest.mark.parametrize("arguments", PROGRAMS.values(), ids=PROGRAMS)
def test_warm_process_does_what_a_new_interpreter_does(tmp_path, monkeypatch, arguments):
    see = "import os, sys\nprint(sys.argv, __file__, os.path.realpath(sys.path[0]), input())\n"
    (tmp_path / "see.py").write_text(see)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").write_text("import sys\nprint(__package__, sys.argv[1:])")
    monkeypatch.setenv("ANSWER", "42")
    options = {"cwd": tmp_path, "input": "line\n", "capture_output": True, "text": True}
    command = [sys.executable, *arguments]

    ended, expected = warm.run(command, **options), subprocess.run(command, **options)

    for name in ("returncode", "stdout", "stderr"):
        assert getattr(ended, name) == getattr(expected, name)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.breaks)
def test_every_planted_fault_has_its_place_in_the_sources(fault):
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    for name in fault.tests.split():
        assert (ROOT / name).exists() or not name.startswith("tests/")


COSTLY = """
import subprocess, pytest, torch

@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()

def test_costly(fresh_compiler):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    subprocess.run("true")
"""


def test_report_has_the_processes_and_the_compilations_of_a_test(tmp_path):
    plugin = f"import sys\nsys.path.append({str(SUPPORT)!r})\npytest_plugins = ('costs',)\n"
    (tmp_path / "conftest.py").write_text(plugin)
    (tmp_path / "test_costly.py").write_text(COSTLY)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    command += ["--junitxml=report.xml", "test_costly.py"]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    (test,) = test_times.tests_of(tmp_path / "report.xml")
    assert (test.processes, test.compiling > 0) == (1, True)


REPORT = """
<testsuites><testsuite name="pytest" time="90.0">
<testcase classname="tests.python.optim.test_optim" name="test_a[1]" time="61"/>
<testcase classname="tests.python.optim.test_optim" name="test_a[2]" time="1"><skipped/></testcase>
<testcase classname="tests.python.memory.test_memory" name="test_b" time="2.5">
<properties><property name="processes" value="2"/></properties></testcase>
<testcase classname="tests.python.memory.test_memory" name="test_c" time="4">
<properties><property name="compiling" value="3"/></properties></testcase>
<testcase classname="tests.python.memory.test_memory" name="test_d" time="4">
<properties><property name="compiling" value="1"/></properties></testcase>
</testsuite></testsuites>
"""
CTEST = """
<testsuite name="(empty)" time="30"><testcase classname="test_cpp" name="test_cpp" time="5.2">
<properties><property name="cmake_labels" value="cpp"/></properties></testcase></testsuite>
"""
# A file that was compiled again has two lines. The last one counts.
NINJA_LOG = """# ninja log v5
0\t3000\t1\tCMakeFiles/a.cu.o\tf
4000\t13000\t1\tCMakeFiles/a.cu.o\tf
"""


def test_slow_files_and_the_budget_are_read_from_the_reports(tmp_path, monkeypatch, capsys):
    tmp_path = tmp_path / "reports"
    tmp_path.mkdir()
    (tmp_path / "python.xml").write_text(REPORT)
    (tmp_path / "ctest.xml").write_text(CTEST)
    (tmp_path.parent / ".ninja_log").write_text(NINJA_LOG)
    flags = ["test_times.py", "--reports", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*flags, "--budget"])
    test_times.main()
    minutes, cases = test_times.budget()
    expected = f"make test: 2.0 of {minutes:.0f} minutes, 5 of {cases} cases"
    assert capsys.readouterr().out.strip() == expected

    monkeypatch.setattr(sys, "argv", flags)
    test_times.main()
    printed = capsys.readouterr().out
    kinds = ("starts processes | 1 | 2", "C++ | 1 | 5", "builds: CUDA kernels | 1 | 9")
    for row in (*kinds, "torch.compile | 1 | 4", "in the test's process | 2 | 65"):
        assert f"| {row} |" in printed

    assert all((ROOT / name).is_file() for name in test_times.SLOW_FILES)
    monkeypatch.setattr(sys, "argv", [*flags, "--check"])
    with pytest.raises(SystemExit, match=r"test_optim\.py \(61 s\)"):
        test_times.main()
