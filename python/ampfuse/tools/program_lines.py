"""Finds lines of a program below those of torch, of this library and of Python's own modules."""

import ast
import linecache
import os
import re
import sys
import sysconfig
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

# Lines of these packages say nothing about a program. Those of other packages do, for example of a
# trainer or of a model. torch wraps deprecated functions by typing_extensions.
BASIC = ("torch", "ampfuse", "numpy", "PIL", "psutil", "typing_extensions")
IN_PACKAGE = re.compile(r".*[\\/](?:site|dist)-packages[\\/](.+)")
FOLDERS = tuple(
    str(folder) + os.sep
    for folder in (
        sysconfig.get_path("stdlib"),
        Path(torch.__file__).parent,
        Path(__file__).parents[1],
    )
)
LONGEST = 60  # characters of a line that is shown


def is_of_program(code: CodeType) -> bool:
    """Return True for code outside of the packages in BASIC and of Python's own modules."""
    file = code.co_filename
    if file.startswith("<"):
        return file == "<stdin>"
    if match := IN_PACKAGE.match(file):
        return re.split(r"[\\/.]", match[1])[0] not in BASIC
    return not file.startswith(FOLDERS)


def program_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the program."""
    while frame is not None and not is_of_program(frame.f_code):
        frame = frame.f_back
    return frame


def file_name(code: CodeType) -> str:
    """Return a short name of a file: from the package on, or without folders."""
    match = IN_PACKAGE.match(code.co_filename)
    return match[1] if match else Path(code.co_filename).name


class Place(NamedTuple):
    """A line of a program."""

    where: str
    """File and line, as in `"train.py:12"`."""
    text: str
    """The line's text, if its file can be read."""
    call: str
    """The name of the function that is called there, if that is known."""

    def __str__(self) -> str:
        """Return the line with its text."""
        return f"{self.where} `{self.text}`" if self.text else self.where


def place(code: CodeType, instruction: int) -> Place:
    """Return the line of an instruction, which is counted in bytes as in `frame.f_lasti`."""
    instruction = max(instruction, 0)
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end)
    line = next(lines, None) or code.co_firstlineno
    text = re.sub(r"\s{2,}#.*", "", linecache.getline(code.co_filename, line)).strip()
    if len(text) > LONGEST:
        text = text[: LONGEST - 1] + "…"
    return Place(f"{file_name(code)}:{line}", text, _called(code, instruction))


def current_line() -> Place | None:
    """Return the line of the program that is running, or None."""
    frame = program_frame(sys._getframe())
    return place(frame.f_code, frame.f_lasti) if frame else None


def _called(code: CodeType, instruction: int) -> str:
    """Return the name of the function that is called, as `item` in `loss.item()`, if known."""
    if sys.version_info < (3, 11):
        return ""
    positions = islice(code.co_positions(), instruction // 2, None)
    first, last, begin, end = next(positions, (None,) * 4)
    if first is None or first != last:
        return ""
    expression = linecache.getline(code.co_filename, first).encode()[begin:end]
    try:
        parsed = ast.parse(expression.decode(errors="replace"), mode="eval").body
    except SyntaxError:
        return ""
    function = getattr(parsed, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))
