"""`python -m ampfuse` with programs that go elsewhere, break on the way, or make many scalers."""

import json

import pytest
from programs import assert_same

STEP = """
import torch

def step(scaler):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_files_are_where_they_were_asked_for_wherever_the_program_goes(programs, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    programs.write("goes.py", "import os; os.chdir('elsewhere')")
    programs.run("-m", "ampfuse", "--json", "told.json", "--plot", "scale.png", "goes.py")
    assert {path.name for path in tmp_path.iterdir()} >= {"told.json", "scale.png"}


def test_a_module_may_be_written_without_a_space(programs):
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
def test_what_packages_raise_is_the_programs(programs, text, module):
    programs.write("broken/__init__.py", text).write("broken/inside.py", "")
    programs.write("broken/__main__.py", "")
    plain, ours = programs.both("-m", module)
    assert ours.returncode == plain.returncode != 0
    assert ours.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert ours.stderr.count("Traceback") == plain.stderr.count("Traceback")


def test_an_end_that_cannot_be_told_changes_no_exit_code(programs):
    programs.write(
        "breaks.py",
        f"{STEP}\nscaler = torch.amp.GradScaler('cpu')\nstep(scaler)\n"
        "scaler._memory = None\nraise SystemExit(7)",
    )
    done = programs.run("-m", "ampfuse", "breaks.py")
    assert done.returncode == 7
    assert "Traceback" not in done.stderr
    assert "python -m ampfuse: " in done.stderr


def test_threads_are_awaited_before_it_tells(programs, tmp_path):
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


def test_of_many_scalers_the_last_are_told_and_none_is_kept_alive(programs, tmp_path):
    programs.write("many.py", MANY)
    done = programs.run("-m", "ampfuse", "--json", "told.json", "many.py")
    assert done.stdout == "0\n"
    assert "24 before these" in done.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert [scaler["taken"] for scaler in told["scalers"]] == [1] * 16
    assert told["earlier_scalers"] == 24
