"""The pages of the documentation, and their blocks of code."""

import re

from packaging_tools import ROOT

PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def code_blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def code_block(language: str, page: str = "README.md") -> str:
    (block,) = code_blocks(language, page)
    return block
