"""`python -m ampfuse program` runs a program unchanged and prints a summary at its end."""

import json
import signal
import subprocess
import sys
import time

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS
from programs import ENVIRONMENT, assert_same

LOOK_AROUND = """
import os, sys
import beside
print(__name__, __file__, __spec__, __package__, __doc__, __cached__, type(__loader__).__name__)
print(sys.argv, os.path.samefile(sys.path[0], os.path.dirname(__file__)), beside.name)
print(sys.modules["__main__"].__dict__ is globals(), __builtins__.__name__)
if __name__ == "__main__":
    print("main")
"""


def test_script_sees_the_same_globals_and_arguments_as_without_ampfuse(programs):
    programs.write("scripts/look.py", LOOK_AROUND).write("scripts/beside.py", "name = __name__")
    assert_same(*programs.both("scripts/look.py", "--lr", "1", "-m", "x", "--json", "env"))


def test_module_sees_the_same_globals_and_arguments_as_without_ampfuse(programs):
    programs.write("pack/__init__.py", "").write("pack/sibling.py", "name = 'relative'")
    programs.write(
        "pack/__main__.py",
        "import sys\nfrom .sibling import name\n"
        "print(name, sys.argv[1:], __package__, __spec__.name, __file__, sys.path[0])",
    )
    programs.write("pack/other.py", "import sys\nprint(__name__, __spec__.name, sys.argv)")
    assert_same(*programs.both("-m", "pack", "-x", "--quiet"))
    assert_same(*programs.both("-m", "pack.other", "y"))


ENDINGS = {
    "all is well": "print('done')",
    "exit": "import sys; sys.exit()",
    "a code": "import sys; sys.exit(7)",
    "a truth": "import sys; sys.exit(not print('well'))",
    "a word": "import sys; sys.exit('gone')",
    "an exception": "def f(x):\n    return 1 / x\n\nf(0)",
    "a chained one": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('b') from e",
    "a syntax error": "print('never')\ndef f(:\n    pass",
    "an interrupt": "raise KeyboardInterrupt",
    "no import": "import nothing_of_that_name",
    "an own hook": "import sys\nsys.excepthook = lambda *e: print(e[0], e[2].tb_lineno)\n1 / 0",
    "at exit": "import atexit\natexit.register(print, 'bye')\nraise RuntimeError('x')",
    "a hard end": "import os; print('now', flush=True); os._exit(5)",
    "a signal": "import os; os.abort()",
}


@pytest.mark.parametrize("text", ENDINGS.values(), ids=list(ENDINGS))
def test_program_ends_the_same_as_without_ampfuse(programs, text):
    programs.write("end.py", text)
    assert_same(*programs.both("end.py"))


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
    assert "ended" in our_errors
    assert "by KeyboardInterrupt" in our_errors


WORKERS = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index * 2

if __name__ == "__main__":
    loader = DataLoader(
        Numbers(), 4, num_workers=2, multiprocessing_context=sys.argv[1], persistent_workers=False
    )
    print([batch.tolist() for batch in loader])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_data_loader_workers_start_with_every_start_method(programs, method):
    programs.write("workers.py", WORKERS)
    # Python's tracker of semaphores sometimes warns when a program ends, with and without us.
    environment = {**ENVIRONMENT, "PYTHONWARNINGS": "ignore:::multiprocessing.resource_tracker"}
    plain, ours = programs.both("workers.py", method, env=environment)
    assert ours.stdout == plain.stdout == "[[0, 2, 4, 6], [8, 10, 12, 14]]\n"
    assert (ours.returncode, ours.stderr) == (0, plain.stderr)


def test_class_of_main_is_pickled_the_same_as_without_ampfuse(programs):
    programs.write(
        "pickles.py",
        "import pickle\nclass C: ...\n"
        "print(pickle.loads(pickle.dumps(C)) is C, pickle.dumps(C)[:40])",
    )
    assert_same(*programs.both("pickles.py"))


TRAIN = """
import torch
from torch.optim import AdamW

torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
optimizer = AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", growth_interval=4)
for step in range(20):
    with torch.autocast("cpu", torch.float16):
        loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 5)), torch.zeros(8).long())
    if step == 7:
        loss = loss * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
print(type(optimizer).__module__, type(scaler).__module__)
"""


def test_summary_reports_the_parts_used_and_the_history_of_the_scale(programs, tmp_path):
    programs.write("train.py", TRAIN)
    done = programs.run("-m", "ampfuse", "--json", "told.json", "--plot", "scale.png", "train.py")

    assert done.returncode == 0, done.stderr
    assert done.stdout == "ampfuse.patching._optimizers ampfuse.amp.grad_scaler\n"
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["program"] == "train.py"
    assert told["torch"] == torch.__version__
    assert told["ended"] == "normally"
    assert {name: part["used"] for name, part in told["parts"].items()} == {
        "scaler": 1,
        "optimizers": 20,
        "cross_entropy": 20,
        "clip_grad_norm": 20,
    }
    (scaler,) = told["scalers"]
    assert scaler["updates"] == 20
    assert scaler["taken"] + scaler["skipped"] == 20
    assert scaler["skipped"] >= 1
    assert scaler["history"][0][0] == 2.0**16
    assert [record[1] for record in scaler["history"]].count(True) == scaler["skipped"]
    assert told["peak_memory"]["host"] > 2**20
    assert told["hints"] == []
    for fact in (
        "train.py",
        "normally",
        "used 20 times",
        f"{scaler['taken']} taken",
        "▁",
        "MiB",
    ):
        assert fact in done.stderr
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_parts_are_chosen_with_only_and_without(programs):
    programs.write("train.py", TRAIN)
    only = programs.run("-m", "ampfuse", "--quiet", "--only", "scaler,clip_grad_norm", "train.py")
    assert only.stdout == "torch.optim.adamw ampfuse.amp.grad_scaler\n"
    assert only.stderr == ""
    without = programs.run("-m", "ampfuse", "--without=scaler", "train.py")
    assert without.stdout == "ampfuse.patching._optimizers torch.amp.grad_scaler\n"
    assert "cross_entropy" in without.stderr
    assert "steps" not in without.stderr
    twice = ("--only", "scaler", "--only", "clip_grad_norm")
    again = programs.run("-m", "ampfuse", "--quiet", *twice, "train.py")
    assert again.stdout == only.stdout
    none = programs.run("-m", "ampfuse", "--only=scaler", "--without=scaler", "train.py")
    assert none.stdout == "torch.optim.adamw torch.amp.grad_scaler\n"


def test_hint_is_printed_when_the_scale_collapses(programs):
    programs.write("train.py", TRAIN.replace("step == 7", "True"))
    done = programs.run("-m", "ampfuse", "train.py")
    assert "hint" in done.stderr
    assert "gradients are not finite at any scale" in " ".join(done.stderr.split())


def test_optimizer_left_to_torch_is_reported_with_the_reason(programs):
    programs.write(
        "left.py",
        "import torch\nfrom torch.optim import Adam as TorchAdam\n"
        "p = torch.nn.Parameter(torch.ones(1))\n"
        "print(type(torch.optim.Adam([p], differentiable=True)).__module__)\n"
        "TABLE = {'adam': torch.optim.Adam}",
    )
    done = programs.run("-m", "ampfuse", "left.py")
    assert done.stdout == "torch.optim.adam\n"
    assert "left to torch once: differentiable=True" in done.stderr


def test_program_that_fails_is_reported_after_its_traceback(programs, tmp_path):
    programs.write("fail.py", "raise OSError('no disk')")
    done = programs.run("-m", "ampfuse", "--json", "told.json", "fail.py")
    assert done.returncode == 1
    assert json.loads((tmp_path / "told.json").read_text())["ended"] == "by OSError"
    *_, error, line = done.stderr.splitlines()
    assert error == "OSError: no disk"
    assert line.startswith("python -m ampfuse: fail.py ended by OSError, after ")
    assert line.endswith(" s and 0 steps")


def test_report_is_printed_on_rank_0_only(programs, tmp_path):
    programs.write("rank.py", "print('here')")
    for rank, told in (("0", True), ("3", False)):
        done = programs.run("-m", "ampfuse", "rank.py", env=ENVIRONMENT | {"RANK": rank})
        assert done.stdout == "here\n"
        assert bool(done.stderr) == told


def test_rank_that_a_program_sets_itself_does_not_change_who_prints_the_summary(programs):
    programs.write("rank.py", "import os\nos.environ['RANK'] = '3'")
    assert "peak memory" in programs.run("-m", "ampfuse", "rank.py").stderr
    programs.write("rank.py", "import os\nos.environ['RANK'] = '0'")
    done = programs.run("-m", "ampfuse", "rank.py", env=ENVIRONMENT | {"RANK": "3"})
    assert done.stderr == ""


def test_forked_child_prints_no_report(programs):
    programs.write("fork.py", "import os\nif os.fork() == 0:\n    pass\nelse:\n    os.wait()")
    done = programs.run("-m", "ampfuse", "fork.py")
    assert done.stderr.count("peak memory") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["missing.py"], "cannot read missing.py: No such file or directory"),
        (["."], ". is a folder, not a script"),
        (["-m", "missing.module"], "cannot find module missing.module: No module named 'missing'"),
        (["-m", "missing"], "there is no module missing"),
        (
            ["--only", "adamw", "x.py"],
            "expected parts among scaler, optimizers, cross_entropy, clip_grad_norm, got 'adamw'",
        ),
        (["--without", "scaler,x", "x.py"], "got 'x'"),
        (["--fast", "x.py"], "--fast"),
        (["--js", "f", "x.py"], "--js"),
        (["--json", "none/x.json", "x.py"], "--json: there is no folder none"),
        (["--plot", "none/x.png", "x.py"], "--plot: there is no folder none"),
        (["--json", ".", "x.py"], "--json: . is a folder"),
        (["--json"], "--json"),
        (["env", "--all"], "env takes no arguments, got --all"),
    ],
)
def test_error_for_bad_arguments_is_one_line(programs, arguments, sentence):
    done = programs.run("-m", "ampfuse", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m ampfuse: ")
    assert sentence in line


def test_usage_is_printed_without_arguments(programs):
    done = programs.run("-m", "ampfuse")
    assert done.returncode == 2
    assert "usage: python -m ampfuse [options] script.py" in done.stderr


def test_help_explains_the_parts_before_the_options_and_has_examples(programs):
    explained, options = programs.run("-m", "ampfuse", "--help").stdout.split("options:\n")
    assert "--without PARTS" in options
    for part in PARTS:
        assert f"\n  {part} " in explained
    assert "examples:\n  python -m ampfuse train.py" in options


@pytest.mark.parametrize("command", ["memory", "advise", "compare"])
def test_help_of_each_command_has_an_example(programs, command):
    done = programs.run("-m", "ampfuse", command, "--help")
    assert done.returncode == 0
    assert f"\n  python -m ampfuse {command} " in done.stdout
    assert done.stderr == ""


def test_version_is_that_of_ampfuse_and_torch(programs):
    done = programs.run("-m", "ampfuse", "--version")
    assert done.returncode == 0
    assert done.stdout == f"ampfuse {ampfuse.__version__}, torch {torch.__version__}\n"


OVERFLOWS = """
import torch
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([parameter])
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for factor in (1.0, float("inf")):
    optimizer.zero_grad()
    scaler.scale((parameter * factor).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
"""


def test_json_is_valid_after_an_overflow_and_uncounted_code_is_reported(programs, tmp_path):
    programs.write("overflows.py", OVERFLOWS)
    done = programs.run("-m", "ampfuse", "--json", "told.json", "overflows.py")
    assert done.returncode == 0
    text = (tmp_path / "told.json").read_text()
    told = json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert [record[1] for record in told["scalers"][0]["history"]] == [False, True]
    assert told["scalers"][0]["history"][1][2] is None
    assert "inside torch.compile are not counted" in done.stderr


def test_summary_that_cannot_be_written_changes_no_exit_code(programs):
    programs.write("ends.py", "import os, sys; os.mkdir('told.json'); sys.exit(3)")
    done = programs.run("-m", "ampfuse", "--json", "told.json", "ends.py")
    assert done.returncode == 3
    assert "python -m ampfuse: " in done.stderr
    assert "told.json" in done.stderr
    assert "Traceback" not in done.stderr
