"""An extension of griffe: examples in docstrings become blocks of code in the reference."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\n).*)*", re.MULTILINE)


class Examples(griffe.Extension):
    """Puts fences around the lines from `>>>` to the next empty line."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object that griffe has read."""
        if obj.docstring is not None:
            fenced = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
            obj.docstring.value = fenced
