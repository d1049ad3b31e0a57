"""The command line of `python -m ampfuse`."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

import ampfuse
from ampfuse.patching.parts import PARTS, chosen
from ampfuse.tools.command.show import why_no_plot

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


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    name: str  # a script ("-" for standard input), a module, or "env"
    is_module: bool
    arguments: list[str]
    parts: list[str]
    json: Path | None
    plot: Path | None
    quiet: bool


def refuse(why: str) -> NoReturn:
    """Print why the command line is refused, and exit with code 2."""
    print(f"python -m ampfuse: {why}", file=sys.stderr)
    sys.exit(2)


def check_files(json: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written when the program has ended."""
    for name, file in (("--json", json), ("--plot", plot)):
        if file is not None and not file.parent.is_dir():
            refuse(f"{name}: there is no folder {file.parent}")
        if file is not None and not os.access(file if file.exists() else file.parent, os.W_OK):
            refuse(f"{name}: {file} cannot be written")
        if file is not None and file.is_dir():
            refuse(f"{name}: {file} is a folder")
    if plot is not None and (why := why_no_plot(plot)):
        refuse(f"--plot: {why}")


class Parser(argparse.ArgumentParser):
    """A parser of our own options, which stand before a program. Its errors are one line."""

    def __init__(self, usage: str, description: str, epilog: str) -> None:
        super().__init__(
            usage=usage,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def read(
        self, arguments: Sequence[str], valued: Iterable[argparse.Action]
    ) -> tuple[argparse.Namespace, bool, list[str]]:
        """Return our options, True if a module follows, and the program's name with its arguments.

        `valued`: the options that take a value.
        """
        names = {name for option in valued for name in option.option_strings}
        own, is_module, words = parted(arguments, names)
        given = self.parse_args(own)
        if not words:
            self.print_usage(sys.stderr)
            sys.exit(2)
        return given, is_module, words

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        refuse(message)


def parse(arguments: Sequence[str]) -> Options:
    """Parse the command line. Our options end at the program's name; the rest is the program's."""
    parser, valued = _parser()
    given, is_module, words = parser.read(arguments, valued)
    if words[0] == "env" and not is_module and len(words) > 1:
        refuse(f"env takes no arguments, got {words[1]}")
    check_files(given.json, given.plot)
    parts = [
        part
        for part in PARTS
        if (given.only is None or part in given.only) and part not in (given.without or ())
    ]
    return Options(
        name=words[0],
        is_module=is_module,
        arguments=words[1:],
        parts=parts,
        json=given.json and given.json.absolute(),  # the program may change the working folder
        plot=given.plot and given.plot.absolute(),
        quiet=given.quiet,
    )


def _parser() -> tuple[Parser, list[argparse.Action]]:
    """Return the parser of our own options, and those that take a value."""
    parser = Parser(
        usage=USAGE,
        description=DESCRIPTION,
        epilog=EPILOG,
    )
    valued = [
        parser.add_argument(
            "--only", action="extend", type=_parts, metavar="PARTS", help="replace only these parts"
        ),
        parser.add_argument(
            "--without",
            action="extend",
            type=_parts,
            metavar="PARTS",
            help="replace all parts but these",
        ),
        parser.add_argument(
            "--json", type=Path, metavar="FILE", help="write the report to a file, as JSON"
        ),
        parser.add_argument(
            "--plot",
            type=Path,
            metavar="FILE",
            help="draw steps, memory and loss scale; needs matplotlib",
        ),
    ]
    parser.add_argument("--quiet", action="store_true", help="print no summary")
    version = f"ampfuse {ampfuse.__version__}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the versions")
    return parser, valued


def parted(arguments: Sequence[str], valued: set[str]) -> tuple[list[str], bool, list[str]]:
    """Return our options, True if a module follows, and the program's name with its arguments.

    The syntax is Python's: `-mpackage` is a module, `--` may stand before a script, and `-` is a
    script on standard input.
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


def _parts(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    try:
        chosen(names, without=())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return names
