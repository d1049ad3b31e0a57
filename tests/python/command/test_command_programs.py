"""`python -m ampfuse` with programs that change folders, fail, or make many scalers."""

import json
import signal
import subprocess
import sys

import pytest
from programs import ENVIRONMENT, assert_same

STEP = """
import torch

def step(scaler, factor=1.0):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    scaler.scale(factor * parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_output_paths_are_relative_to_the_folder_where_the_program_started(programs, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    programs.write("goes.py", "import os; os.chdir('elsewhere')")
    programs.run("-m", "ampfuse", "--json", "told.json", "--plot", "scale.png", "goes.py")
    assert {path.name for path in tmp_path.iterdir()} >= {"told.json", "scale.png"}


def test_dash_m_accepts_a_module_name_without_a_space(programs):
    programs.write("args.py", "import sys\nprint(sys.argv[1:])")
    plain = programs.run("-margs", "-mx", "--lr", "1")
    assert plain.stdout == "['-mx', '--lr', '1']\n"
    for options in ([], ["--only", "scaler"]):
        ours = programs.run("-m", "ampfuse", "--quiet", *options, "-margs", "-mx", "--lr", "1")
        assert_same(plain, ours)


@pytest.mark.parametrize(
    "text",
    ["raise ValueError('of its own')", "import nothing_of_that_name", "import sys; sys.exit(3)"],
)
@pytest.mark.parametrize("module", ["broken", "broken.inside"])
def test_exception_of_a_package_ends_the_program_as_without_ampfuse(programs, text, module):
    programs.write("broken/__init__.py", text).write("broken/inside.py", "")
    programs.write("broken/__main__.py", "")
    plain, ours = programs.both("-m", module)
    assert ours.returncode == plain.returncode != 0
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert ours.stderr.count("Traceback") == plain.stderr.count("Traceback")


def test_report_that_fails_changes_no_exit_code(programs):
    programs.write(
        "breaks.py",
        f"{STEP}\nscaler = torch.amp.GradScaler('cpu')\nstep(scaler)\n"
        "scaler._history = None\nraise SystemExit(7)",
    )
    done = programs.run("-m", "ampfuse", "breaks.py")
    assert done.returncode == 7
    assert "Traceback" not in done.stderr
    assert "The record of a scaler cannot be read" in done.stderr


def test_report_waits_for_the_threads_of_the_program(programs, tmp_path):
    programs.write(
        "threads.py",
        f"import threading, time\n{STEP}\n"
        "def work():\n    time.sleep(0.5)\n    step(torch.amp.GradScaler('cpu'))\n"
        "threading.Thread(target=work).start()",
    )
    programs.run("-m", "ampfuse", "--json", "told.json", "threads.py")
    parts = json.loads((tmp_path / "told.json").read_text())["parts"]
    assert parts["optimizers"]["used"] == 1


MANY = f"""
import weakref
{STEP}
alive = []
for _ in range(40):
    scaler = torch.amp.GradScaler("cpu")
    step(scaler)
    alive.append(weakref.ref(scaler))
del scaler
print(sum(scaler() is not None for scaler in alive))
"""


@pytest.mark.slow
def test_last_16_scalers_are_reported_and_none_is_kept_alive(programs, tmp_path):
    programs.write("many.py", MANY)
    done = programs.run("-m", "ampfuse", "--json", "told.json", "many.py")
    assert done.stdout == "0\n"
    assert "24 earlier ones are not shown" in done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert [scaler["taken"] for scaler in told["scalers"]] == [1] * 16
    assert told["earlier_scalers"] == 24


ENDING_LATE = {
    "an idle pool": "from concurrent.futures import ThreadPoolExecutor\n"
    "pool = ThreadPoolExecutor(1)\npool.submit(print, 'work').result()\nprint('end')",
    "one that watches": "import threading, time\nmain = threading.main_thread()\n"
    "def watch():\n    while main.is_alive():\n        time.sleep(0.01)\n    print('seen')\n"
    "threading.Thread(target=watch).start()",
    "the compiler's": "from torch._inductor.async_compile import AsyncCompile\n"
    "AsyncCompile.submit(print, 'compiled').result()",
    "what starts another": "import threading, time\n"
    "def two():\n    time.sleep(0.1)\n    print('two')\n"
    "threading.Thread(target=lambda: threading.Thread(target=two).start()).start()",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", ENDING_LATE.values(), ids=list(ENDING_LATE))
def test_program_with_late_threads_ends_the_same_as_without_ampfuse(programs, text):
    programs.write("late.py", text)
    assert_same(*programs.both("late.py"))


@pytest.mark.slow
def test_compiled_program_ends_the_same_as_without_ampfuse(programs):
    programs.write("compiled.py", "import torch\nprint(torch.compile(torch.sin)(torch.zeros(9)))")
    plain, ours = programs.both("compiled.py")
    # stderr may differ: the compiler's warnings contain the time of day.
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode == 0


FRAMES = """
import atexit, sys

class Resource:
    def __del__(self):
        print("closed")

def main():
    resource = Resource()
    ENDS

atexit.register(lambda: print("at exit", getattr(sys, "last_value", None)))
main()
"""


@pytest.mark.parametrize("ends", ["sys.exit(3)", "raise ValueError(7)", "pass"])
def test_objects_of_a_program_are_released_the_same_as_without_ampfuse(programs, ends):
    programs.write("frames.py", FRAMES.replace("ENDS", ends))
    assert_same(*programs.both("frames.py"))


HOOKS = {
    "fails": "raise KeyError('in the hook')",
    "exits": "sys.exit(9)",
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=list(HOOKS))
def test_exception_hook_that_raises_ends_the_program_as_without_ampfuse(programs, hook):
    programs.write(
        "hook.py", f"import sys\ndef hook(*_):\n    {hook}\nsys.excepthook = hook\n1 / 0"
    )
    assert_same(*programs.both("hook.py"))


def test_interrupted_program_ends_by_sigint_even_if_stderr_is_full(programs):
    programs.write("interrupt.py", "raise KeyboardInterrupt")
    with open("/dev/full", "w") as full:
        for arguments in (["interrupt.py"], ["-m", "ampfuse", "interrupt.py"]):
            done = subprocess.run(
                [sys.executable, *arguments], cwd=programs.folder, env=ENVIRONMENT, stderr=full
            )
            assert done.returncode == -signal.SIGINT


def test_plot_imports_matplotlib_only_after_the_program_configured_it(programs, tmp_path):
    programs.write(
        "draws.py",
        "import os, sys\nprint('matplotlib' in sys.modules)\nos.environ['MPLBACKEND'] = 'svg'\n"
        "import matplotlib\nprint(matplotlib.get_backend())",
    )
    done = programs.run("-m", "ampfuse", "--plot", "scale.png", "draws.py")
    assert done.stdout == "False\nsvg\n"
    assert (tmp_path / "scale.png").exists()
    assert "there was no scaler that was updated" in done.stderr


CLOSED = {
    "closed": "import sys; sys.stderr.close()",
    "none": "import sys; sys.stderr = None",
    "another": "import io, sys; sys.stderr = io.StringIO()",
}


@pytest.mark.parametrize("text", CLOSED.values(), ids=list(CLOSED))
def test_program_that_closes_stderr_ends_the_same_as_without_ampfuse(programs, tmp_path, text):
    programs.write("closed.py", f"{text}\nprint('here')")
    plain = programs.run("closed.py")
    ours = programs.run("-m", "ampfuse", "--json", "told.json", "closed.py")
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout) == (0, "here\n")
    assert json.loads((tmp_path / "told.json").read_text())["ended"] == "normally"
    assert ("peak memory" in ours.stderr) == ("close()" not in text)


@pytest.mark.slow
def test_double_dash_and_a_module_named_env_work_as_without_ampfuse(programs):
    programs.write("args.py", "import sys\nprint(sys.argv[1:])").write("env.py", "print('own')")
    assert_same(*programs.both("-m", "args", "a", "--", "--lr", "1", "--quiet"))
    assert_same(*programs.both("args.py", "a", "--", "--lr", "1"))
    assert_same(*programs.both("--", "args.py", "--", "1"))
    assert_same(*programs.both("-m", "env"))


def told_of(programs, text):
    programs.write("tells.py", f"{STEP}\n{text}")
    done = programs.run("-m", "ampfuse", "--json", "told.json", "tells.py")
    assert done.returncode == 0, done.stderr
    return json.loads((programs.folder / "told.json").read_text())


@pytest.mark.slow
def test_scale_that_started_small_is_not_reported_as_collapsed(programs):
    told = told_of(programs, "scaler = torch.amp.GradScaler('cpu', 0.5)\nstep(scaler)")
    assert told["hints"] == []


@pytest.mark.slow
def test_hint_about_skipped_steps_states_only_what_has_happened(programs):
    new = "scaler = torch.amp.GradScaler('cpu', {})\n"
    once = "step(scaler, float('inf'))\nfor _ in range(20): step(scaler)"
    assert told_of(programs, f"{new.format(1.0)}{once}")["hints"] == []
    constant = "scaler.set_backoff_factor(1.0)\nfor _ in range(10): step(scaler, float('inf'))"
    (hint,) = told_of(programs, f"{new.format(64.0)}{constant}")["hints"]
    assert hint.startswith("The last 10 steps were skipped, and the loss scale is now 64: ")


@pytest.mark.slow
def test_hint_about_frequent_skips_tells_a_high_scale_from_bad_batches(programs):
    bad = "scaler = torch.amp.GradScaler('cpu', growth_interval=3)\n"
    bad += "for i in range(60): step(scaler, float('inf') if i % 5 == 4 else 1.0)"
    (hint,) = told_of(programs, bad)["hints"]
    assert hint.startswith("6 of the last 30 steps were skipped, at scales that were not too high")
    high = "scaler = torch.amp.GradScaler('cpu', 2.0**125, growth_interval=1)\n"
    high += "for _ in range(60): step(scaler, 2.0**40)"
    (hint,) = told_of(programs, high)["hints"]
    assert "most of them after the scale had grown" in hint


@pytest.mark.slow
def test_report_counts_the_steps_of_a_scaler_since_it_was_loaded(programs):
    load = "scaler.load_state_dict({**scaler.state_dict(), 'updates': 1000})"
    new = "scaler = torch.amp.GradScaler('cpu')\n"
    (resumed,) = told_of(programs, f"{new}{load}\nstep(scaler)")["scalers"]
    assert (resumed["taken"], resumed["updates"]) == (1, 1)
    (reset,) = told_of(programs, f"{new}step(scaler)\n{load}\nstep(scaler)\nstep(scaler)")[
        "scalers"
    ]
    assert (reset["taken"], reset["updates"]) == (2, 2)


def test_plot_with_an_unknown_suffix_is_refused_before_the_program_runs(programs):
    programs.write("never.py", "print('ran')")
    done = programs.run("-m", "ampfuse", "--plot", "scale.xyz", "never.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--plot: expected a file that ends in .png, .pdf, .svg, got scale.xyz" in done.stderr


@pytest.mark.slow
def test_program_may_overwrite_attributes_of_its_scaler(programs, tmp_path):
    programs.write(
        "notes.py",
        f"{STEP}\nscaler = torch.amp.GradScaler('cpu')\nscaler.history = []\n"
        "step(scaler)\nscaler.get_scale = None\nx: int\nprint(__annotations__)\nexit(False)",
    )
    plain, ours = programs.run("notes.py"), programs.run("-m", "ampfuse", "notes.py")
    assert ours.stdout == plain.stdout
    assert ours.returncode == plain.returncode == 0
    programs.run("-m", "ampfuse", "--json", "told.json", "notes.py")
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["ended"] == "by sys.exit(0)"
    assert told["scalers"][0]["taken"] == 1
    assert told["hints"] == []
