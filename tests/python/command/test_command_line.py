"""The command line of `python -m ampfuse`: errors, help and version."""

import ampfuse
import pytest
import torch
from ampfuse.patching import PARTS


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("missing.py", "cannot read missing.py: No such file or directory"),
        (".", ". is a folder, not a script"),
        ("-m missing.module", "cannot find module missing.module: No module named 'missing'"),
        ("-m missing", "there is no module missing"),
        (
            "--only adamw x.py",
            "expected parts among scaler, optimizers, cross_entropy, clip_grad_norm, got 'adamw'",
        ),
        ("--without scaler,x x.py", "got 'x'"),
        ("--fast x.py", "--fast"),
        ("--js f x.py", "--js"),
        ("--json none/x.json x.py", "--json: there is no folder none"),
        ("--plot none/x.png x.py", "--plot: there is no folder none"),
        ("--html none/x.html x.py", "--html: there is no folder none"),
        ("--plot x.xyz x.py", "--plot: expected a file that ends in .png, .pdf, .svg, got x.xyz"),
        ("--json . x.py", "--json: . is a folder"),
        ("--json", "--json"),
        ("env --all", "env takes no arguments, got --all"),
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
        ("compare", "compare before.json after.json"),
        ("compare a.json", "compare before.json after.json"),
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


@pytest.mark.parametrize("command", ["memory", "advise", "compare"])
def test_help_of_each_command_has_an_example(programs, command):
    done = programs.ours(command, "--help")
    assert done.returncode == 0
    assert f"\n  python -m ampfuse {command} " in done.stdout
    assert done.stderr == ""


def test_version_is_that_of_ampfuse_and_torch(programs):
    done = programs.ours("--version")
    assert done.returncode == 0
    assert done.stdout == f"ampfuse {ampfuse.__version__}, torch {torch.__version__}\n"
