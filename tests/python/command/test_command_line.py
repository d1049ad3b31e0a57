"""The command line of `python -m ampfuse`: errors, help, version, and `compare`."""

import json
import re

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS
from ampfuse.tools.diagnosis.phases import PHASES


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("missing.py", "cannot read missing.py: No such file or directory"),
        (".", ". is a folder, not a script"),
        ("-m missing.module", "No module named 'missing'"),
        ("-m missing", "No module named missing"),
        (
            "--only adamw x.py",
            "expected parts among scaler, optimizers, cross_entropy, clip_grad_norm, got 'adamw'",
        ),
        ("--without scaler,x x.py", "got 'x'"),
        ("--fast x.py", "--fast"),
        ("--js f x.py", "--js"),
        ("--json none/x.json x.py", "--json: there is no folder none"),
        ("--plot none/x.png x.py", "--plot: there is no folder none"),
        ("--plot x.xyz x.py", "--plot: expected a file that ends in .png, .pdf, .svg, got x.xyz"),
        ("--json . x.py", "--json: . is a folder"),
        ("--json", "--json"),
        ("env --all", "env takes no arguments, got --all"),
        ("advis x.py", "cannot read advis: No such file or directory; did you mean 'advise'?"),
    ],
)
def test_error_for_bad_arguments_is_one_line_before_the_program_runs(programs, line, sentence):
    done = programs.write("x.py", "print('ran')").ours(*line.split())
    assert done.returncode == 2
    assert done.stdout == ""
    (error,) = done.stderr.splitlines()
    assert error.startswith("python -m ampfuse: ")
    assert sentence in error


@pytest.mark.parametrize(
    ("line", "usage"),
    [
        ("", "[options] script.py"),
        ("compare", "compare [-h] before.json after.json"),
        ("compare a.json", "compare [-h] before.json after.json"),
    ],
)
def test_usage_is_printed_if_words_are_missing(programs, line, usage):
    done = programs.ours(*line.split())
    assert done.returncode == 2
    assert f"usage: python -m ampfuse {usage}" in done.stderr


def test_help_explains_the_parts_before_the_options_and_has_examples(programs):
    explained, options = programs.ours("--help").stdout.split("options:\n")
    assert "--without PARTS" in options
    for part in PARTS:
        assert f"\n  {part} " in explained
    assert "examples:\n  python -m ampfuse train.py" in options


@pytest.mark.parametrize("command", ["memory", "advise", "compare", "env"])
def test_each_command_has_a_help(programs, command):
    done = programs.ours(command, "--help")
    assert done.returncode == 0
    assert f"python -m ampfuse {command}" in done.stdout
    assert done.stderr == ""


PARSES = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lr')\np.parse_args()"
IGNORES = PARSES.replace("parse_args", "parse_known_args")


@pytest.mark.parametrize("text", [PARSES, IGNORES])
@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("x.py --lr 1 --json x.json", "--json"),
        ("memory x.py --fit=2GiB", "--fit"),
        ("-m package.x --plot x.png", "--plot"),
        ("x.py --sgd words", None),
        ("x.py --help", None),
    ],
)
def test_own_option_behind_a_script_that_does_not_mention_it_is_named(programs, line, option, text):
    done = programs.write("x.py", text).write("package/x.py", text).ours(*line.split())
    assert ("goes before the script" in done.stderr) == (option is not None)
    assert option is None or f": {option} is passed on to " in done.stderr
    if line.startswith("memory"):  # argparse's own error is the last word
        assert "\n" not in done.stderr.partition("unrecognized arguments")[2].strip()


def test_option_that_the_script_mentions_is_not_named(programs):
    done = programs.write("x.py", PARSES.replace("lr", "json")).ours("x.py", "--json", "x.json")
    assert "goes before the script" not in done.stderr


def test_compare_says_how_to_write_a_file_that_is_missing(programs):
    done = programs.ours("compare", "a.json", "b.json")
    assert done.returncode == 2
    assert "there is no file a.json: write it with python -m ampfuse --json a.json" in done.stderr


def test_version_is_that_of_ampfuse_and_torch(programs):
    done = programs.ours("--version")
    assert done.returncode == 0
    assert done.stdout == f"ampfuse {ampfuse.__version__}, torch {torch.__version__}\n"


def report(forward=10.0, *, width=0.1, hints=(), skipped=1, peak=100, steps=True):
    milliseconds = dict.fromkeys(PHASES, 0.0) | {"forward": forward, "backward": 20.0}
    whole = sum(milliseconds.values())
    spread = {
        name: [time - width, time + width]
        for name, time in {"a step": whole, **milliseconds}.items()
    }
    times = {"count": 100, "milliseconds": milliseconds, "median": whole, "spread": spread}
    return {
        "steps": times if steps else None,
        "program": "train.py",
        "scalers": [{"taken": 99, "skipped": skipped, "scale": 65536.0}],
        "peak_memory": {"host": peak * 2**20, "cuda:0": peak * 2**21},
        "hints": list(hints),
    }


@pytest.fixture
def compare(programs):
    def run(before, after):
        for name, content in (("a.json", before), ("b.json", after)):
            programs.write(name, content if isinstance(content, str) else json.dumps(content))
        return programs.ours("compare", "a.json", "b.json")

    return run


def test_times_memory_and_scalers_are_compared(compare):
    done = compare(report(), report(4.0, skipped=3, peak=50))
    assert done.returncode == 0, done.stderr
    *table, caution = done.stdout.splitlines()
    assert "compare runs on a quiet machine" in caution
    assert [re.split(r" {2,}", line.strip()) for line in table] == [
        ["a.json", "b.json", "change"],
        ["steps", "100", "100", "+0%"],
        ["a step", "30.00 ms", "24.00 ms", "-20%"],
        ["median", "30.00 ms", "24.00 ms", "-20%"],
        ["forward", "10.00 ms", "4.00 ms", "-60%"],
        ["backward", "20.00 ms", "20.00 ms", "within the spread"],
        ["peak memory", "100 MiB", "50.0 MiB", "-50%"],
        ["peak on cuda:0", "200 MiB", "100 MiB", "-50%"],
        ["steps taken", "99", "99", "+0%"],
        ["steps skipped", "1", "3", "+200%"],
        ["last scale", "65536", "65536", "+0%"],
    ]


@pytest.mark.parametrize(("after", "is_noise"), [(14.0, True), (6.0, True), (16.5, False)])
def test_times_whose_usual_ranges_overlap_are_not_reported_as_changes(compare, after, is_noise):
    lines = compare(report(10.0, width=3.0), report(after, width=3.0)).stdout.splitlines()
    times = [line for line in lines if re.match(r"a step|  (median|forward)", line)]
    assert [line.endswith("within the spread") for line in times] == [is_noise] * 3


def test_hint_about_a_time_that_has_not_changed_is_not_new(compare):
    after = report(hints=["56% of a step (10.5 ms) waits for input: ", "slow"])
    lines = compare(report(), after).stdout.splitlines()
    assert "new: slow" in lines
    assert not any("input" in line for line in lines)


def test_report_of_an_older_version_is_refused(compare):
    older = report()
    del older["steps"]["spread"]
    assert "b.json was written by an older version" in compare(report(), older).stderr


def test_hints_that_are_new_or_gone_are_printed(compare):
    before = report(hints=["51% of a step (10.5 ms) waits", "too few workers"])
    after = report(hints=["49% of a step (9.75 ms) waits", "slow"])
    *lines, _ = compare(before, after).stdout.splitlines()
    assert lines[-2:] == ["no longer: too few workers", "new: slow"]


def test_programs_that_differ_or_have_few_steps_or_no_scalers_can_be_compared(compare):
    other = report(steps=False) | {"program": "other.py", "scalers": []}
    done = compare(report(), other)
    assert done.returncode == 0
    _, programs, steps, *others = done.stdout.splitlines()
    assert programs.split() == ["program", "train.py", "other.py"]
    assert steps.split() == ["steps", "100"]
    assert ["steps", "taken", "99"] in [line.split() for line in others]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"program": "a", "steps": null, "scalers": [], "peak_memory": {}}'],
)
def test_files_that_are_no_reports_are_refused(compare, content):
    done = compare(report(), content)
    assert done.returncode == 2
    told = "compare: b.json is not a report that python -m ampfuse --json has written"
    assert done.stderr == f"python -m ampfuse: {told}\n"
