"""The summary and the reports that `python -m ampfuse program` makes when the program ends."""

import json

import pytest
import torch
from programs import ENVIRONMENT, Programs

STEP = """
import torch

def step(scaler, factor=1.0):
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    scaler.scale(factor * parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
"""
TRAIN = """
import torch
from torch.optim import AdamW

torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
optimizer = AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", growth_interval=4)
for step in range(20):
    with torch.autocast("cpu", torch.bfloat16):
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
    done, told = programs.reported("--plot", "scale.png", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ampfuse.patching.optimizers ampfuse.amp.grad_scaler\n"
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
    skipped = [record for record in scaler["history"] if record[1]]
    assert len(skipped) == scaler["skipped"]
    assert [norm for _, _, norm in skipped] == [None] * len(skipped)  # JSON has no infinity
    text = (tmp_path / "told.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert told["peak_memory"]["host"] > 2**20
    assert told["hints"] == []
    taken = f"{scaler['taken']} taken"
    for fact in ("train.py", "normally", "used 20 times", taken, "▁", "MiB"):
        assert fact in done.stderr
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


def test_program_that_trains_by_sgd_and_a_scaler_has_ampfuses_parts(programs):
    optimizer = "torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)"
    programs.write("train.py", TRAIN.replace("AdamW(model.parameters())", optimizer))
    done, told = programs.reported("train.py")
    assert done.stdout == "ampfuse.patching.optimizers ampfuse.amp.grad_scaler\n"
    assert told["parts"]["optimizers"] == {"used": 20, "waits_avoided": 0, "left_to_torch": {}}
    assert told["optimizers_of_torch"] == []
    assert "optimizers" in done.stderr
    assert "left to torch" not in done.stderr


def test_parts_are_chosen_with_only_and_without(programs):
    programs.write("train.py", TRAIN)
    only = ("--only", "scaler,clip_grad_norm", "--only", "cross_entropy")
    done, told = programs.reported("--quiet", *only, "train.py")
    assert done.stdout == "torch.optim.adamw ampfuse.amp.grad_scaler\n"
    assert done.stderr == ""
    assert set(told["parts"]) == {"scaler", "clip_grad_norm", "cross_entropy"}
    without = programs.ours("--without=scaler", "-", input=TRAIN)
    assert without.stdout == "ampfuse.patching.optimizers torch.amp.grad_scaler\n"
    assert "cross_entropy" in without.stderr
    assert "steps" not in without.stderr
    none = programs.ours("--only=scaler", "--without=scaler", "train.py")
    assert none.stdout == "torch.optim.adamw torch.amp.grad_scaler\n"


def test_optimizer_left_to_torch_is_reported_with_the_reason(programs):
    programs.write(
        "left.py",
        "import torch\nfrom torch.optim import Adam as TorchAdam\n"
        "p = torch.nn.Parameter(torch.ones(1))\n"
        "print(type(torch.optim.Adam([p], differentiable=True)).__module__)\n"
        "TABLE = {'adam': torch.optim.Adam}",
    )
    done = programs.ours("left.py")
    assert done.stdout == "torch.optim.adam\n"
    assert "left to torch once: differentiable=True" in done.stderr


@pytest.mark.parametrize("module", ["torch.amp", "__import__('ampfuse')"])
def test_steps_beside_a_scaler_are_noticed_also_of_an_optimizer_left_to_torch(programs, module):
    programs.write(
        "rmsprop.py",
        f"{STEP}\nmodel = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)\n"
        f"scaler = {module}.GradScaler('cpu')\n"
        "for _ in range(20):\n"
        "    scaler.scale(model(torch.ones(4)).sum()).backward()\n"
        "    optimizer.step()\n",
    )
    done, told = programs.reported("rmsprop.py")
    assert told["optimizers_of_torch"] == ["RMSprop"]
    assert "left to torch: RMSprop, since ampfuse has only Adam, AdamW and SGD" in done.stderr
    assert "rmsprop.py:15: UserWarning: a GradScaler has scaled 20 losses" in done.stderr
    assert "A GradScaler has scaled losses, but taken no step." in done.stderr
    assert any(hint.startswith("a GradScaler has scaled 20 losses") for hint in told["hints"])


@pytest.mark.parametrize("options", [[], ["--quiet"]])
def test_loss_that_makes_weights_nan_gives_a_hint_while_the_program_runs(programs, options):
    diverges = """
import sys, torch
param = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([param], 0.1)
for factor in (1.0, float("nan"), 1.0):
    (factor * param.sum()).backward()
    optimizer.step()
print("the program goes on", file=sys.stderr)
"""
    done, told = programs.write("train.py", diverges).reported(*options, "train.py")
    hint = "The loss of step 2 is nan, and weights are no longer finite"
    assert told["hints"][0].startswith(hint)
    before, _, after = done.stderr.partition("the program goes on")
    assert (hint in before, hint in after) == (not options, not options)


def test_program_that_fails_is_reported_after_its_traceback(programs):
    programs.write("fail.py", "raise OSError('no disk')")
    done, told = programs.reported("fail.py")
    assert done.returncode == 1
    assert told["ended"] == "by OSError (no disk)"
    *_, error, line = done.stderr.splitlines()
    assert error == "OSError: no disk"
    assert line.startswith("python -m ampfuse: fail.py ended by OSError (no disk), after ")
    assert line.endswith(" s and 0 steps")


@pytest.mark.parametrize(("rank", "others"), [("0", "3"), ("3", "0")])
def test_report_is_printed_on_rank_0_only_whatever_rank_the_program_sets(programs, rank, others):
    programs.write("rank.py", f"import os\nos.environ['RANK'] = '{others}'\nprint('here')")
    done = programs.ours("rank.py", env=ENVIRONMENT | {"RANK": rank})
    assert done.stdout == "here\n"
    assert ("peak memory" in done.stderr) == bool(done.stderr) == (rank == "0")


def test_forked_child_prints_no_report(programs):
    programs.write("fork.py", "import os\nif os.fork() == 0:\n    pass\nelse:\n    os.wait()")
    assert programs.ours("fork.py").stderr.count("peak memory") == 1


def test_summary_that_cannot_be_written_changes_no_exit_code(programs):
    programs.write("ends.py", "import os, sys; os.mkdir('told.json'); sys.exit(3)")
    done = programs.ours("--json", "told.json", "ends.py")
    assert done.returncode == 3
    assert "python -m ampfuse: " in done.stderr
    assert "told.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_report_that_fails_changes_no_exit_code(programs):
    programs.write(
        "breaks.py",
        f"{STEP}\nscaler = torch.amp.GradScaler('cpu')\nstep(scaler)\n"
        "scaler._history = None\nraise SystemExit(7)",
    )
    done = programs.ours("breaks.py")
    assert done.returncode == 7
    assert "Traceback" not in done.stderr
    assert "The record of a scaler cannot be read" in done.stderr


def test_report_waits_for_the_threads_of_the_program(programs):
    programs.write(
        "threads.py",
        f"import threading, time\n{STEP}\n"
        "def work():\n    time.sleep(0.5)\n    step(torch.amp.GradScaler('cpu'))\n"
        "threading.Thread(target=work).start()",
    )
    _, told = programs.reported("threads.py")
    assert told["parts"]["optimizers"]["used"] == 1


def test_plot_is_drawn_after_the_program_and_where_it_started(programs, tmp_path):
    """The program may configure matplotlib before it is imported, and change the folder."""
    programs.write("elsewhere/empty.py", "")
    programs.write(
        "draws.py",
        "import os, sys\nprint('matplotlib' in sys.modules)\nos.environ['MPLBACKEND'] = 'svg'\n"
        "import matplotlib\nprint(matplotlib.get_backend())\n"
        f"{STEP}\nstep(torch.amp.GradScaler('cpu'))\nos.chdir('elsewhere')",
    )
    done, _ = programs.reported("--plot", "scale.png", "draws.py", fresh=True)
    assert done.stdout == "False\nsvg\n"
    assert (tmp_path / "scale.png").exists()
    done, _ = programs.reported("--plot", "nothing.png", "elsewhere/empty.py")
    assert "--plot: there were too few steps, and no scaler that was updated" in done.stderr


MANY = f"""
{STEP}
for _ in range(40):
    step(torch.amp.GradScaler("cpu"))
"""


def test_last_16_scalers_are_reported(programs):
    programs.write("many.py", MANY)
    done, told = programs.reported("many.py")
    assert done.returncode == 0
    assert [scaler["taken"] for scaler in told["scalers"]] == [1] * 16


SKIPS = f"""
{STEP}
inf = float("inf")
for steps_before_loading, steps_after in ((0, 1), (1, 2)):
    loaded = torch.amp.GradScaler("cpu")
    for _ in range(steps_before_loading):
        step(loaded)
    loaded.load_state_dict({{**loaded.state_dict(), "updates": 1000}})
    for _ in range(steps_after):
        step(loaded)
step(torch.amp.GradScaler("cpu", 0.5))  # starts small
skips_once = torch.amp.GradScaler("cpu", 1.0)
for factor in [inf] + 20 * [1.0]:
    step(skips_once, factor)
constant = torch.amp.GradScaler("cpu", 64.0)
constant.set_backoff_factor(1.0)
for _ in range(10):
    step(constant, inf)
bad_batches = torch.amp.GradScaler("cpu", growth_interval=3)
for i in range(60):
    step(bad_batches, inf if i % 5 == 4 else 1.0)
too_high = torch.amp.GradScaler("cpu", 2.0**125, growth_interval=1)
for _ in range(60):
    step(too_high, 2.0**40)
falling = torch.amp.GradScaler("cpu", 1024.0)
for i in range(260):
    step(falling, inf if i % 12 == 11 else 1.0)
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
"""


@pytest.fixture(scope="module")
def skips(tmp_path_factory):
    programs = Programs(tmp_path_factory.mktemp("skips")).write("skips.py", SKIPS)
    done, told = programs.reported("skips.py")
    assert done.returncode == 0, done.stderr
    assert all(hint in done.stderr for hint in told["hints"])
    return told


def test_hints_about_skipped_steps_state_only_what_has_happened(skips):
    compiled, warned, constant, bad_batches, too_high, falling = skips["hints"]
    assert warned.startswith("each of the last 32 steps was skipped")
    assert compiled.startswith("Calls inside torch.compile are not counted")
    assert constant.startswith("The last 10 steps were skipped, and the loss scale is now 64: ")
    assert "gradients are not finite at any scale" in constant
    many = "6 of the last 30 steps were skipped, at scales that were not too high"
    assert bad_batches.startswith(many)
    assert "most of them after the scale had grown" in too_high
    assert falling.startswith("The loss scale has fallen to 0.000488: ")


def test_report_counts_the_steps_of_a_scaler_since_it_was_loaded(skips):
    counts = [(scaler["taken"], scaler["updates"]) for scaler in skips["scalers"][:2]]
    assert counts == [(1, 1), (2, 2)]


def test_program_may_overwrite_attributes_of_its_scaler(programs):
    programs.write(
        "notes.py",
        f"{STEP}\nscaler = torch.amp.GradScaler('cpu')\nscaler.history = []\n"
        "step(scaler)\nscaler.get_scale = None\nexit(False)",
    )
    done, told = programs.reported("notes.py")
    assert done.returncode == 0
    assert told["ended"] == "by sys.exit(False)"
    assert told["scalers"][0]["taken"] == 1
    assert told["hints"] == []


OWN_NAMES = f"""
import ampfuse
{STEP}
class Derived(ampfuse.GradScaler):
    def __init__(self):
        super().__init__("cpu", history=0)
    def is_enabled(self):
        return self.is_made
scaler = {{scaler}}
scaler.is_made = True
for i in range(30):
    step(scaler, float("inf") if i > 9 else 1.0)
"""


@pytest.mark.parametrize(
    ("scaler", "length"),
    [
        ("ampfuse.GradScaler('cpu')", 30),
        ("ampfuse.GradScaler('cpu', history=12)", 12),
        ("Derived()", 30),
    ],
)
def test_scaler_of_ampfuses_own_name_is_reported_like_one_of_torchs(programs, scaler, length):
    done, told = programs.write("train.py", OWN_NAMES.format(scaler=scaler)).reported("train.py")
    assert done.returncode == 0, done.stderr
    (found,) = told["scalers"]
    skipped = min(length, 20)
    assert len(found["history"]) == length
    assert (found["updates"], found["taken"], found["skipped"]) == (30, length - skipped, skipped)
    assert told["hints"][-1].startswith("The last 10 steps were skipped,")
    assert f"{found['taken']} taken, {found['skipped']} skipped" in done.stderr
    assert "scaler, cross_entropy, clip_grad_norm, since the program does not call" in done.stderr


DISABLED = """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters())
scaler = torch.amp.GradScaler("cpu", enabled=False)
loss = model(torch.ones(2, 4)).sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
"""


OWN_SCALER = """
import ampfuse
class Lion(torch.optim.RMSprop):
    pass
optimizer = Lion(model.parameters())
scaler = ampfuse.GradScaler("cpu")
with torch.autocast("cpu", torch.float16):
    loss = model(torch.ones(2, 4)).sum()
scaler.scale(loss).backward()
scaler.step(optimizer)
"""


def test_scaler_that_is_made_and_not_used_does_not_count_as_one(programs):
    used = "import torch\nmodel = torch.nn.Linear(4, 4)" + OWN_SCALER
    unused = used.partition("scaler.scale")[0] + "loss.backward()\noptimizer.step()"
    for text, expected in ((used, 0), (unused, 1)):
        _, told = programs.write("train.py", text).reported("train.py")
        assert sum("no GradScaler is used" in hint for hint in told["hints"]) == expected


def test_scaler_that_is_disabled_is_reported_unless_the_program_has_another_one(programs):
    own = DISABLED.replace("torch.amp", "__import__('ampfuse')")
    for text in (own, DISABLED):
        _, told = programs.write("train.py", text).reported("train.py")
        assert told["scaler_disabled"]
        assert told["parts"]["scaler"]["used"] == 0
    programs.write("train.py", DISABLED + OWN_SCALER)
    _, told = programs.reported("train.py")
    assert not told["scaler_disabled"]
    assert not any("no GradScaler is used" in hint for hint in told["hints"])
    assert told["optimizers_of_torch"] == []
    assert told["parts"]["optimizers"]["used"] == 1
