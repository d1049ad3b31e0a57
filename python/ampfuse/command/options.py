"""What `python -m ampfuse` is asked for."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from ampfuse.patching import PARTS

USAGE = """python -m ampfuse [options] script.py [arguments of the script]
       python -m ampfuse [options] -m module [arguments of the module]
       python -m ampfuse env"""

EPILOG = f"""Parts are {", ".join(PARTS)}. Without the script's knowledge
torch's names mean ampfuse's then: see ampfuse.patch. 'env' tells what works here."""


@dataclass(frozen=True)
class Options:
    """As they were given."""

    name: str  # of a script, of a module, or "env"
    is_module: bool
    arguments: list[str]
    parts: list[str]
    json: Path | None
    plot: Path | None
    quiet: bool


def refuse(why: str) -> NoReturn:
    """One sentence, and the exit code for it."""
    print(f"python -m ampfuse: {why}", file=sys.stderr)
    sys.exit(2)


VALUED = ("--only", "--without", "--json", "--plot")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(message)


def parse(arguments: Sequence[str]) -> Options:
    """Options end where the program begins: what follows is the program's."""
    parser = _Parser(
        usage=USAGE,
        description="Run a program as it is, with ampfuse.",
        epilog=EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", action="extend", type=_parts, metavar="PARTS", help="replace only these"
    )
    parser.add_argument(
        "--without", action="extend", type=_parts, metavar="PARTS", help="replace all but these"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what happened there")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw how the loss scale moved")
    parser.add_argument("--quiet", action="store_true", help="say nothing at the end")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(_with_module_apart(arguments))
    words = given.program if given.module is None else given.module
    if not words:
        parser.print_usage(sys.stderr)
        sys.exit(2)
    if words[0] == "env" and given.module is None and len(words) > 1:
        refuse(f"env takes no arguments, got {words[1]}")
    if given.module is None and words[0].startswith("-"):
        refuse(f"unknown option {words[0]}")
    if given.plot is not None and find_spec("matplotlib") is None:
        refuse("--plot needs matplotlib: pip install matplotlib")
    for name, file in (("--json", given.json), ("--plot", given.plot)):
        if file is not None and not file.parent.is_dir():
            refuse(f"{name}: there is no folder {file.parent}")
    parts = [
        part
        for part in PARTS
        if (given.only is None or part in given.only) and part not in (given.without or ())
    ]
    return Options(
        name=words[0],
        is_module=given.module is not None,
        arguments=words[1:],
        parts=parts,
        json=given.json and given.json.absolute(),  # programs may go elsewhere
        plot=given.plot and given.plot.absolute(),
        quiet=given.quiet,
    )


def _with_module_apart(arguments: Sequence[str]) -> list[str]:
    """`-mpackage` as two words, where it is an option of ours; Python takes it, argparse half."""
    apart = list(arguments)
    place = 0
    while place < len(apart) and apart[place].startswith("-") and apart[place] != "-m":
        if apart[place].startswith("-m"):
            apart[place : place + 1] = ["-m", apart[place][2:]]
            break
        place += 2 if apart[place] in VALUED else 1
    return apart


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"unknown part {name!r}: there are {', '.join(PARTS)}")
    return names
