"""The command `python -m ampfuse advise`: which precision suits an unchanged program.

The program's first steps run again and again, each time in another precision.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from ampfuse.tools.command.options import Parser, refuse
from ampfuse.tools.command.report import write
from ampfuse.tools.command.show import say
from ampfuse.tools.precision import show
from ampfuse.tools.precision.advisor import NoAdviceError, advise
from ampfuse.tools.precision.trial import Program

USAGE = """python -m ampfuse advise [options] script.py [arguments of the script]
       python -m ampfuse advise [options] -m module [arguments of the module]"""
EPILOG = """The script runs several times until its optimizer has taken these steps: in
float32, and in bfloat16 and float16 by autocast. torch.save writes to a temporary
folder; other files that the script writes are written each time.

examples:
  python -m ampfuse advise train.py --model large
  python -m ampfuse advise --steps 100 --json advice.json train.py"""
STEPS = 20
LEAST_STEPS = 10  # four that are analysed, two that warm up, and four that are timed
MOST_STEPS = 200


def main(arguments: Sequence[str]) -> NoReturn:
    """Run `python -m ampfuse advise` with these arguments."""
    program, given = parse(arguments)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        refuse("advise: expected one process, got several; run it without a launcher")
    try:
        advice = advise(program, say)
    except NoAdviceError as error:
        refuse(f"advise: {error}")
    # Files are written first: a terminal may lack characters of the text.
    if given.json is not None:
        write(show.as_dict(advice), given.json)
    if given.plot is not None:
        show.plot(advice, given.plot)
    print(show.text(advice, program.words[0]))
    sys.exit(0)


def parse(arguments: Sequence[str]) -> tuple[Program, Namespace]:
    """Parse the command line."""
    parser = Parser(
        usage=USAGE,
        description="Find the precision that suits a program.",
        epilog=EPILOG,
        json="write all numbers to it",
        plot="draw the losses",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        metavar="N",
        help=f"steps to take, {LEAST_STEPS} to {MOST_STEPS}; {STEPS} if not given",
    )
    given = parser.read(arguments)
    if not LEAST_STEPS <= given.steps <= MOST_STEPS:
        refuse(f"--steps: expected {LEAST_STEPS} to {MOST_STEPS}, got {given.steps}")
    if not given.is_module and not Path(given.words[0]).is_file():
        refuse(f"advise: expected a file, which can run again, got {given.words[0]}")
    return Program(given.words, given.is_module, given.steps), given
