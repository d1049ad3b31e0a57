"""The command line of `python -m ampfuse`."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch

import ampfuse
from ampfuse.patching.parts import PARTS, chosen

USAGE = """python -m ampfuse [options] script.py [arguments of the script]
       python -m ampfuse [options] -m module [arguments of the module]
       python -m ampfuse memory [options] script.py [arguments of the script]
       python -m ampfuse advise [options] script.py [arguments of the script]
       python -m ampfuse compare before.json after.json
       python -m ampfuse env"""

DESCRIPTION = """Run a program as it is, with ampfuse: while it runs, names of torch mean ampfuse's.
At the end, print what was used and what to change. PARTS are some of these names,
with commas between them:

  scaler          torch.amp.GradScaler
  optimizers      torch.optim.Adam and AdamW
  cross_entropy   torch.nn.functional.cross_entropy, and so torch.nn.CrossEntropyLoss
  clip_grad_norm  torch.nn.utils.clip_grad_norm_"""

EPILOG = f"""A script named - is read from standard input.

other commands:
  memory           run two steps without computing numbers, and print what memory is for
  advise           run in float32 and in 16 bits, and print which precision suits
  compare          print what differs between two reports that --json has written
  env              print what is installed, what works here, and what to change
'memory', 'advise' and 'compare' have a --help of their own.

examples:
  python -m ampfuse train.py --epochs 3
  python -m ampfuse --without optimizers -m package.train
  torchrun --nproc-per-node 2 --module ampfuse train.py

what is gained, measured:
  python -m ampfuse --json ours.json train.py
  python -m ampfuse --without {",".join(PARTS)} --json torch.json train.py
  python -m ampfuse compare torch.json ours.json"""


PICTURES = (".png", ".pdf", ".svg")


def refuse(why: str) -> NoReturn:
    """Print why the command line is refused, and exit with code 2."""
    print(f"python -m ampfuse: {why}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """A parser of our own options, which stand before a program. Its errors are one line.

    `json` and `plot` are the help of the two options that all commands have.
    """

    def __init__(self, *, usage: str, description: str, epilog: str, json: str, plot: str) -> None:
        super().__init__(
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("--json", type=checked(output), metavar="FILE", help=json)
        self.add_argument("--plot", type=checked(picture), metavar="FILE", help=plot)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return our options, with `words`, the program's name and arguments, and `is_module`."""
        valued = {
            name
            for action in self._actions
            if action.nargs is None  # it takes one value
            for name in action.option_strings
        }
        own, is_module, words = parted(arguments, valued)
        given = self.parse_args(own, argparse.Namespace(is_module=is_module, words=words))
        if not words:
            self.print_usage(sys.stderr)
            sys.exit(2)
        return given

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        refuse(message)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. Our options end at the program's name; the rest is the program's."""
    parser = Parser(
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
        json="write the report to a file, as JSON",
        plot="draw steps, memory and loss scale; needs matplotlib",
    )
    for name, help in (("--only", "only these parts"), ("--without", "all parts but these")):
        parser.add_argument(
            name,
            action="extend",
            default=[],
            type=names_in,
            metavar="PARTS",
            help=f"replace {help}",
        )
    parser.add_argument("--quiet", action="store_true", help="print no summary")
    version = f"ampfuse {ampfuse.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the versions")
    given = parser.read(arguments)
    if given.words[0] == "env" and not given.is_module and len(given.words) > 1:
        refuse(f"env takes no arguments, got {given.words[1]}")
    try:
        given.parts = chosen(given.only, given.without)
    except ValueError as error:
        refuse(str(error))
    return given


def names_in(text: str) -> list[str]:
    """Return the names in a text, with commas between them."""
    return [name.strip() for name in text.split(",")]


def parted(arguments: Sequence[str], valued: set[str]) -> tuple[list[str], bool, list[str]]:
    """Return our options, True if a module follows, and the program's name with its arguments.

    The syntax is Python's: `-mpackage` is a module, `--` may stand before a script, and `-` is a
    script on standard input. `valued`: the options that take a value.
    """
    words = list(arguments)
    index = 0
    while index < len(words):
        word = words[index]
        own, rest = words[:index], words[index + 1 :]
        if word == "--":
            return own, False, rest
        if word.startswith("-m"):
            return own, True, [word[2:], *rest] if word[2:] else rest
        if word == "-" or not word.startswith("-"):
            return own, False, [word, *rest]
        index += 2 if word in valued else 1
    return words, False, []


def checked(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that converts an option's value, whose ValueError is the parser's error."""

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return converted


def output(name: str) -> Path:
    """Return a file that can be written when the program has ended, wherever that goes."""
    file = Path(name)
    if not file.parent.is_dir():
        raise ValueError(f"there is no folder {file.parent}")
    if file.is_dir():
        raise ValueError(f"{file} is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"{file} cannot be written")
    return file.absolute()


def picture(name: str) -> Path:
    """Return a file for a plot. The program may configure matplotlib before its first import."""
    if find_spec("matplotlib") is None:
        raise ValueError("needs matplotlib: pip install matplotlib")
    if Path(name).suffix not in PICTURES:
        raise ValueError(f"expected a file that ends in {', '.join(PICTURES)}, got {name}")
    return output(name)
