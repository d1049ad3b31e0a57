"""Blocks of code on the pages of the documentation."""

import re

from packaging_tools import ROOT


def code_blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def code_block(language: str, page: str = "README.md") -> str:
    (block,) = code_blocks(language, page)
    return block
