"""`python -m ampfuse -` runs a program on standard input as `python -` does."""

import os

import pytest
from programs import assert_same

LOOK_AROUND = """
import sys
print(sorted((name, str(value)) for name, value in globals().items()))
print(sys.argv, sys.path[0], repr(sys.stdin.read()), "é")
1 / 0
"""


@pytest.mark.parametrize(
    "arguments", [["-"], ["-", "--lr", "1", "-", "-m", "--quiet"], ["--", "-"]]
)
def test_program_on_standard_input_sees_the_same_globals_as_without_ampfuse(programs, arguments):
    plain, ours = programs.both(*arguments, input=LOOK_AROUND)
    assert "ZeroDivisionError" in plain.stderr
    assert_same(plain, ours)


@pytest.mark.parametrize("text", ["", "x = (", "import sys; sys.exit(7)", "import beside"])
def test_program_on_standard_input_ends_the_same_as_without_ampfuse(programs, text):
    programs.write("beside.py", "print('imported')")
    assert_same(*programs.both("-", input=text))


def test_closed_standard_input_ends_the_same_as_without_ampfuse(programs):
    assert_same(*programs.both("-", preexec_fn=lambda: os.close(0)))


OPTIMIZER = """
import torch
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([parameter])
parameter.sum().backward()
optimizer.step()
print(type(optimizer).__module__)
"""


def test_program_on_standard_input_is_patched_and_has_a_summary(programs):
    done = programs.run("-m", "ampfuse", "--only", "optimizers", "-", input=OPTIMIZER)
    assert done.stdout == "ampfuse.patching._optimizers\n"
    assert "used once" in done.stderr
