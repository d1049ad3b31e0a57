"""Writes the schemas of all operators into docs/reference/operators.md.

python tools/schemas.py
"""

import re
import textwrap
from pathlib import Path

import ampfuse  # noqa: F401  (registers the operators)
import torch

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "operators.md"
MARKED = re.compile(r"(<!-- schemas -->\n).*?(<!-- end -->)", re.DOTALL)


def with_schemas(page: str) -> str:
    """Return the page's text with the schemas of the loaded library."""
    schemas = (str(schema) for schema in torch._C._jit_get_all_schemas())
    ours = sorted(schema for schema in schemas if schema.startswith("ampfuse::"))
    ours = [textwrap.fill(schema, 100, subsequent_indent="    ") for schema in ours]
    block = "\n".join(["```", *ours, "```", ""])
    return MARKED.sub(lambda match: match[1] + block + match[2], page)


if __name__ == "__main__":
    PAGE.write_text(with_schemas(PAGE.read_text()))
