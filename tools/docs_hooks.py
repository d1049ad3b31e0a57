"""Hooks of MkDocs: the reference of the C++ headers, made from their comments.

`<!-- header: NAME.h -->` on a page becomes the documented declarations of that header.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tree_sitter_cpp
from tree_sitter import Language, Node, Parser

HEADERS = Path(__file__).parents[1] / "csrc" / "include" / "ampfuse"
MARKED = re.compile(r"<!-- header: (\S+) -->")
TYPES = ("class_specifier", "struct_specifier", "enum_specifier")
# Comments of Doxygen as items of a list, which begins after an empty line.
COMMANDS = {
    r"\\file\b": "",
    r"(?<!\n)\n\\(param|return|throws)": r"\n\n\\\1",
    r"\\param (\w+)": r"- `\1`:",
    r"\\return\b": "- returns:",
    r"\\throws\b": "- throws",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of a page. MkDocs calls this function."""
    return MARKED.sub(lambda match: reference(match[1]), markdown)


def reference(header: str) -> str:
    """Return the reference of a header as Markdown."""
    text = (HEADERS / header).read_text().replace("AMPFUSE_API ", "")
    text = re.sub(r"^extern template .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"TORCH_ARG\((.+?), (\w+)\)", r"Option<\1> \2", text)  # a macro is not parsed
    root = Parser(Language(tree_sitter_cpp.language())).parse(text.encode()).root_node
    return f"`#include <ampfuse/{header}>`\n\n{''.join(declarations(root))}"


def declarations(parent: Node) -> Iterator[str]:
    """Yield the public declarations in a file, a namespace or a type."""
    comment: list[str] = []
    is_public = True
    last_line = -1  # of the previous declaration; a comment on this line belongs to it
    for node in parent.children:
        if node.type == "access_specifier":
            is_public = source(node) == "public"
        elif node.type == "comment":
            if node.start_point.row != last_line and not source(node).startswith("///<"):
                comment.append(source(node))
        elif node.is_named:
            if is_public:
                yield from declared(node, prose([*comment, *trailing(node)]))
            comment, last_line = [], node.end_point.row


def trailing(node: Node) -> list[str]:
    """Return the comment at the end of a declaration's line, and on the lines that continue it."""
    found: list[str] = []
    line, following = node.end_point.row, node.next_sibling
    while following is not None and following.start_point.row <= line:
        if following.type == "comment":
            found.append(source(following))
            line = following.start_point.row + 1
        following = following.next_sibling
        if found and not (following and source(following).startswith("///<")):
            break
    return found


def declared(node: Node, text: str) -> Iterator[str]:
    """Yield a declaration with its comment, and what is declared in it."""
    if node.type.startswith("preproc"):
        yield f"{text}\n\n" if text else ""  # the comment of the file
        return
    if node.type == "namespace_definition":
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if body is not None and (name is None or source(name) != "detail"):
            yield from declarations(body)
        return
    found = next((each for each in (node, *node.children) if each.type in TYPES), None)
    body = found.child_by_field_name("body") if found is not None else None
    if found is not None and body is not None:
        base = next((each for each in found.children if each.type == "base_class_clause"), None)
        yield f"### {source(found.child_by_field_name('name'))}\n\n"
        yield f"`{' '.join(head(node).split('{')[0].split())}`\n\n" if base else ""
        yield f"{text}\n\n"
        yield from declarations(body)
        yield "\n"
    elif text:
        code = re.sub(r"\n\s+", "\n    ", head(node))
        plain = re.sub(r"^template <.*?>\s", "", code, flags=re.DOTALL)
        name = re.match(r"using (\w+) =|[^=]*?(operator[^\s(]+|\w+)\(", plain)
        is_member = node.parent is not None and node.parent.type == "field_declaration_list"
        if name is not None and not is_member:
            yield f"\n### {name[1] or name[2]}\n"
        if name is not None and name[2]:
            yield f"\n```cpp\n{code}\n```\n\n{text}\n\n"
        else:
            line = re.sub(r"^Option<(.+)> (\w+)", r"\2(\1)", " ".join(code.split()).rstrip(";"))
            yield f"\n- `{line}`: {' '.join(text.split())}\n"


def head(node: Node) -> str:
    """Return a declaration without the body of a function."""
    bodies = ("compound_statement", "field_initializer_list")
    function = next((each for each in node.children if each.type == "function_definition"), node)
    body = next((each for each in function.children if each.type in bodies), None)
    end = node.end_byte if body is None else body.start_byte
    assert node.text is not None
    return node.text[: end - node.start_byte].decode().strip().rstrip(";:, \n") + ";"


def prose(comments: list[str]) -> str:
    """Return the text of comments as Markdown."""
    lines = [re.sub(r"^//[/<!]* ?", "", line) for line in comments]
    text = "\n".join(lines)
    for command, replacement in COMMANDS.items():
        text = re.sub(command, replacement, text)
    return text.strip()


def source(node: Node | None) -> str:
    """Return the source of a node."""
    assert node is not None
    assert node.text is not None
    return node.text.decode()
