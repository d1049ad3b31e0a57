"""`python -m ampfuse program`: the program sees the same and ends the same as without ampfuse."""

import os
import signal
import subprocess
import sys
import time

import pytest
from programs import ENVIRONMENT, assert_same

LOOK_AROUND = """
import os, sys
print(__name__, __file__, __package__, __doc__, __cached__, type(__loader__).__name__)
print(__spec__ and __spec__.name, sys.argv, os.path.realpath(sys.path[0]))
print(sys.modules["__main__"].__dict__ is globals(), __builtins__.__name__)
"""
COMMAND_LINES = [
    "scripts/look.py --lr 1 -m x --json env",
    "look.py a -- --lr 1",
    "link.py",
    "-- look.py -- 1",
    "-m look a -- --lr 1 --quiet",
    "-mlook -mx --lr 1",
    "-m env",  # a module with the name of a command
    "-m pack -x --quiet",
    "-m pack.look y",
]


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_program_sees_the_same_globals_and_arguments_as_without_ampfuse(programs, line):
    for name in ("scripts/look.py", "look.py", "env.py", "pack/look.py"):
        programs.write(name, LOOK_AROUND)
    (programs.folder / "link.py").symlink_to("scripts/look.py")
    programs.write("pack/__init__.py", "import sys\nprint(sys.argv)").write("pack/sibling.py", "")
    programs.write("pack/__main__.py", f"{LOOK_AROUND}\nfrom . import sibling")
    assert_same(*programs.both(*line.split()))


LOOK_AROUND_STANDARD_INPUT = """
import sys
import beside
print(sorted((name, str(value)) for name, value in globals().items()))
print(sys.argv, sys.path[0], repr(sys.stdin.read()), "é")
1 / 0
"""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("- --lr 1 - -m --quiet", LOOK_AROUND_STANDARD_INPUT),
        ("-- -", LOOK_AROUND_STANDARD_INPUT),
        ("-", ""),
        ("-", "x = ("),
    ],
)
def test_program_on_standard_input_sees_and_ends_the_same_as_without_ampfuse(programs, line, text):
    programs.write("beside.py", "print('imported')")
    assert_same(*programs.both(*line.split(), input=text))


def test_closed_standard_input_ends_the_same_as_without_ampfuse(programs):
    assert_same(*programs.both("-", preexec_fn=lambda: os.close(0), fresh=True))


FRAMES = """
import atexit, sys

class Resource:
    def __del__(self):
        print("closed")

def main():
    resource = Resource()
    {}

atexit.register(lambda: print("at exit", getattr(sys, "last_value", None)))
main()
"""


@pytest.mark.parametrize("ends", ["pass", "sys.exit(3)", "raise ValueError(7)"])
def test_objects_of_a_program_are_released_the_same_as_without_ampfuse(programs, ends):
    programs.write("frames.py", FRAMES.format(ends))
    assert_same(*programs.both("frames.py", fresh=True))


ENDINGS = {
    "exit": "import sys; sys.exit()",
    "a truth": "import sys; sys.exit(not print('well'))",
    "a word": "import sys; sys.exit('gone')",
    "a chained one": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
    "a syntax error": "print('never')\ndef f(:\n    pass",
    "no import": "import nothing_of_that_name",
    "an own hook": "import sys\nsys.excepthook = lambda *e: print(e[0], e[2].tb_lineno)\n1 / 0",
    "a hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(9)\n1 / 0",
    "a hard end": "import os; print('now', flush=True); os._exit(5)",
    "a signal": "import os; os.abort()",
    "a pickled class": "import pickle\nclass C: ...\n"
    "print(pickle.loads(pickle.dumps(C)) is C, pickle.dumps(C)[:40])",
    "annotations": "x: int\nprint(__annotations__)",
    # Threads that end late.
    "an idle pool": "from concurrent.futures import ThreadPoolExecutor\n"
    "pool = ThreadPoolExecutor(1)\npool.submit(print, 'work').result()\nprint('end')",
    "a thread that watches": "import threading, time\nmain = threading.main_thread()\n"
    "def watch():\n    while main.is_alive():\n        time.sleep(0.01)\n    print('seen')\n"
    "threading.Thread(target=watch).start()",
    "a thread that starts another": "import threading, time\n"
    "def two():\n    time.sleep(0.1)\n    print('two')\n"
    "threading.Thread(target=lambda: threading.Thread(target=two).start()).start()",
}


@pytest.mark.parametrize("text", ENDINGS.values(), ids=list(ENDINGS))
def test_program_ends_the_same_as_without_ampfuse(programs, text):
    programs.write("end.py", text)
    assert_same(*programs.both("end.py"))


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("raise ValueError('of its own')", "broken"),
        ("import nothing_of_that_name", "broken"),
        ("import sys; sys.exit(3)", "broken"),
        ("raise ValueError('of its own')", "broken.inside"),
        ("import nothing_of_that_name", "broken.inside"),
    ],
)
def test_exception_of_a_package_ends_the_program_as_without_ampfuse(programs, text, module):
    programs.write("broken/__init__.py", text).write("broken/inside.py", "")
    programs.write("broken/__main__.py", "")
    plain, ours = programs.both("-m", module)
    assert ours.returncode == plain.returncode != 0
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert ours.stderr.count("Traceback") == plain.stderr.count("Traceback")


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.stderr.close()",
        "import sys; sys.stderr = None",
        "import io, sys; sys.stderr = io.StringIO()",
    ],
)
def test_program_that_closes_stderr_ends_the_same_as_without_ampfuse(programs, text):
    programs.write("closed.py", f"{text}\nprint('here')")
    plain = programs.run("closed.py", fresh=True)
    ours, told = programs.reported("closed.py", fresh=True)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (0, "here\n")
    assert told["ended"] == "normally"
    assert ("peak memory" in ours.stderr) == ("close()" not in text)


def test_control_c_ends_a_program_the_same_as_without_ampfuse(programs):
    programs.write("wait.py", "import time\nprint('ready', flush=True)\ntime.sleep(60)")
    endings = []
    for arguments in (["wait.py"], ["-m", "ampfuse", "wait.py"]):
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=programs.folder,
            env=ENVIRONMENT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A background job of a shell ignores SIGINT, and so would this child process.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
        endings.append((process.returncode, errors))
    (code, errors), (our_code, our_errors) = endings
    assert our_code == code == -signal.SIGINT
    assert our_errors.startswith(errors)
    assert "by KeyboardInterrupt" in our_errors.removeprefix(errors)


def test_interrupted_program_ends_by_sigint_even_if_stderr_is_full(programs):
    programs.write("interrupt.py", "raise KeyboardInterrupt")
    with open("/dev/full", "w") as full:
        for arguments in (["interrupt.py"], ["-m", "ampfuse", "interrupt.py"]):
            done = programs.run(*arguments, stderr=full, fresh=True)
            assert done.returncode == -signal.SIGINT


WORKERS = """
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index * 2

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Numbers(), 2, num_workers=1, multiprocessing_context=method)
        print([batch.tolist() for batch in loader])
"""


@pytest.mark.slow
def test_data_loader_workers_start_with_every_start_method(programs):
    programs.write("workers.py", WORKERS)
    # Python's tracker of semaphores sometimes warns when a program ends, with and without us.
    environment = {**ENVIRONMENT, "PYTHONWARNINGS": "ignore:::multiprocessing.resource_tracker"}
    done = programs.ours("--quiet", "workers.py", env=environment, fresh=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[[0, 2], [4, 6]]\n" * 3
