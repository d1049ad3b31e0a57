"""The command line of `python -m ampfuse`."""

import argparse
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import torch

import ampfuse
from ampfuse.patching.parts import chosen
from ampfuse.tools.command.show import say

USAGE = """python -m ampfuse [options] script.py [arguments of the script]
       python -m ampfuse [options] -m module [arguments of the module]
       python -m ampfuse memory|advise|compare|env ..."""

DESCRIPTION = """Run a program as it is, with ampfuse: while it runs, names of torch mean ampfuse's.
At the end, print what was used and what to change. PARTS are some of these names,
with commas between them:

  scaler          torch.amp.GradScaler
  optimizers      torch.optim.Adam, AdamW and SGD
  cross_entropy   torch.nn.functional.cross_entropy, and so torch.nn.CrossEntropyLoss
  clip_grad_norm  torch.nn.utils.clip_grad_norm_"""

EPILOG = """A script named - is read from standard input.

other commands, each with a --help of its own:
  memory           run two steps without computing numbers, and print what memory is for
  advise           run in float32 and in 16 bits, and print which precision suits
  compare          print what differs between two reports that --json has written
  env              print what is installed, what works here, and what to change

examples:
  python -m ampfuse train.py --epochs 3
  python -m ampfuse --without optimizers -m package.train
  torchrun --nproc-per-node 2 --module ampfuse train.py"""

ENV = """usage: python -m ampfuse env

Print what is installed, what works here, and what to change."""
EVERYONES = ("-h", "--help", "--version")  # options that scripts have without mentioning them
COMMANDS = ("memory", "compare", "advise")  # beside env, which has no options
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
        self.options: set[str] = set()
        super().__init__(
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
        self.add_argument("--json", type=output, metavar="FILE", help=json)
        self.add_argument("--plot", type=picture, metavar="FILE", help=plot)

    def add_argument(self, *names: Any, **kwargs: Any) -> Any:
        """Add an option, and note its names."""
        self.options.update(name for name in names if name.startswith("-"))
        return super().add_argument(*names, **kwargs)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return our options, with `words`, the program's name and arguments, and `is_module`.

        The syntax is Python's: `-mpackage` is a module, `--` may stand before a script, and `-` is
        a script on standard input.
        """
        count = len(arguments)
        end = next((i for i in range(count) if arguments[i].startswith("-m")), count)
        given = self.parse_args(arguments[:end])
        given.is_module = end < count and not given.words  # if not, -m belongs to the script
        given.words += arguments[end:]
        if given.is_module:
            given.words[0] = given.words[0].removeprefix("-m")
        if given.words[:1] in ([""], ["--"]):
            del given.words[0]
        if not given.words:
            self.print_usage(sys.stderr)
            sys.exit(2)
        self._explain_position(given)
        return given

    def _explain_position(self, given: argparse.Namespace) -> None:
        """Print a sentence if one of our options is passed to a script that does not mention it."""
        program, *others = given.words
        names = {word.partition("=")[0] for word in others} & self.options - {*EVERYONES}
        file = Path(f"{program.replace('.', os.sep)}.py" if given.is_module else program)
        is_quiet = getattr(given, "quiet", False) or os.environ.get("RANK", "0") != "0"
        if not names or is_quiet:
            return
        with suppress(OSError):  # there is no such file, or it cannot be read
            text = file.read_text(errors="replace")
            for name in sorted(name for name in names if name not in text):
                say(
                    f"{name} is passed on to {program}, which does not mention it: an option of "
                    "ampfuse goes before the script"
                )

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
    parts: dict[str, Any] = {"action": "extend", "default": [], "metavar": "PARTS"}
    parts["type"] = lambda names: names.split(",")
    parser.add_argument("--only", help="replace only these parts", **parts)
    parser.add_argument("--without", help="replace all parts but these", **parts)
    parser.add_argument("--quiet", action="store_true", help="print no summary")
    version = f"ampfuse {ampfuse.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the versions")
    given = parser.read(arguments)
    if given.words[0] == "env" and not given.is_module and len(given.words) > 1:
        if given.words[1] in ("-h", "--help"):
            print(ENV)
            sys.exit()
        refuse(f"env takes no arguments, got {given.words[1]}")
    try:
        given.parts = chosen(given.only, given.without)
    except ValueError as error:
        refuse(str(error))
    return given


def output(name: str) -> Path:
    """Return a file that can be written when the program has ended, wherever that goes."""
    file = Path(name)
    if not file.parent.is_dir():
        raise ArgumentTypeError(f"there is no folder {file.parent}")
    if file.is_dir():
        raise ArgumentTypeError(f"{file} is a folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ArgumentTypeError(f"{file} cannot be written")
    return file.absolute()


def picture(name: str) -> Path:
    """Return a file for a plot. The program may configure matplotlib before its first import."""
    if find_spec("matplotlib") is None:
        raise ArgumentTypeError("needs matplotlib: pip install matplotlib")
    if Path(name).suffix not in PICTURES:
        raise ArgumentTypeError(f"expected a file that ends in {', '.join(PICTURES)}, got {name}")
    return output(name)
