"""Public names are documented, in docstrings and in the comments of installed headers."""

import doctest
import importlib
import inspect
import pkgutil
import re

import ampfuse
import pytest
from docstring_sections import assert_described, mistakes
from packaging_tools import ROOT

MODULES = ["checkpoint", "distributed", "integrations", "memory", "ops"]


def test_docstring_examples_give_the_results_that_they_show():
    found = [module.name for module in pkgutil.walk_packages(ampfuse.__path__, "ampfuse.")]
    assert len(found) > 100
    names = [name for name in found if "integrations." not in name]  # which need frameworks
    failed = [
        name
        for name in ["ampfuse", *names]
        if doctest.testmod(importlib.import_module(name)).failed > 0
    ]
    assert failed == []


def test_every_op_has_an_example_in_its_docstring():
    public = [getattr(ampfuse.ops, name) for name in ampfuse.ops.__all__]
    ops = [value for value in public if inspect.isfunction(value)]
    assert len(ops) > 5
    finder = doctest.DocTestParser()
    assert [op.__name__ for op in ops if not finder.get_examples(op.__doc__)] == []


@pytest.mark.parametrize("module", ["ampfuse", *[f"ampfuse.{name}" for name in MODULES]])
def test_docstrings_describe_exactly_the_arguments(module):
    assert_described(importlib.import_module(module))


def documented(argument: int, other: str = "") -> int:
    """Return a number.

    Args:
        argument: The number, which is described
            in two lines.
        other: A text.

    Returns:
        The number.
    """


def undocumented(argument: int, other: str = "") -> int:
    """Return a number.

    Args:
        argument: The number.
        another: An argument that does not exist.

    >>> undocumented(1)
    """


def test_missing_and_surplus_arguments_are_found():
    assert mistakes(documented) == []
    assert mistakes(undocumented) == [
        "has no `other:` in Args",
        "has `another:` in Args, but no such argument",
        "has Args, but no Returns",
        "has an example outside of an `Examples:` section",
    ]


FOLDER = ROOT / "csrc" / "include" / "ampfuse"
HEADERS = [*sorted(FOLDER.glob("*.h")), FOLDER / "version.h.in"]

NEEDS_NO_COMMENT = re.compile(
    r"#(?!define)|\}|namespace |(class|struct) \w+;|using (\w+::)+\w+;|extern template |~"
    r"|FORWARD_HAS_DEFAULT_ARGS|.* = delete;"
)
# The scope that a brace opens after this word. All others are bodies of functions.
SCOPES = {"namespace": "public", "struct": "public", "class": "private", "enum": "enum"}


def declarations(header):
    """Yield line, text and Doxygen's comment of each public declaration that needs a comment.

    A declaration ends with a line that ends in a semicolon or a brace, as clang-format writes it.
    """
    scopes = []  # one for each open brace
    comment = text = ""
    first = 0
    for number, line in enumerate(header.splitlines(), 1):
        code, _, remark = (part.strip() for part in line.partition("//"))
        if not code:  # a comment, which belongs to the declaration below, or an empty line
            is_above = remark.startswith("/") and not remark.startswith("/<")
            comment = f"{comment} {remark}" if is_above else comment if text else ""
            continue
        if access := re.fullmatch(r"(public|protected|private):", code):
            scopes[-1] = access[1]
            continue
        first = first if text else number
        text = f"{text} {code}".strip()
        comment += remark if remark.startswith("/<") else ""
        ends = (";", "{", "}", ",") if scopes[-1:] == ["enum"] else (";", "{", "}")
        is_whole = "body" in scopes or code.endswith(ends) or re.match("#|TORCH_MODULE", text)
        if not is_whole:
            continue
        is_public = not {"body", "private", "protected"} & {*scopes}
        if is_public and not NEEDS_NO_COMMENT.match(text):
            yield first, text, comment
        opened = code.count("{") - code.count("}")
        word = re.sub("^template <.*?> ", "", text).split()[0]
        is_hidden = "body" in scopes or text == "namespace detail {"
        scope = "body" if is_hidden else SCOPES.get(word, "body")
        scopes = [*scopes, *[scope] * opened][: len(scopes) + opened]
        comment = text = ""


SAMPLE = """\
#include <string>
namespace ampfuse {
class Other;
/// A class.
class Known : public Other {
  int none_;

 public:
  explicit Known(
      int size);
  ~Known();
  int size() const { return size_; }
  /// Runs.
  void run(const std::vector<int>& list = {}) {
    if (size_) {
      later();
    }
  }
  bool is_ready;  ///< true at the end
                  ///< of a run

 private:
  int size_;
};
namespace detail {
int hidden();
}  // namespace detail
enum class Kind {
  kOne,
};
// This is no comment for Doxygen.
template <bool kFlag>
struct Options {
  TORCH_ARG(bool, is_quick) = false;  // nor is this
};
}  // namespace ampfuse
"""


def test_the_parser_finds_public_declarations_and_their_comments():
    found = {line: bool(comment) for line, _, comment in declarations(SAMPLE)}
    with_comment, without = [5, 14, 19], [9, 12, 28, 29, 32, 34]
    assert found == {**dict.fromkeys(with_comment, True), **dict.fromkeys(without, False)}


def test_public_declarations_have_comments_for_doxygen():
    assert len(HEADERS) > 15
    found = [
        (f"{header.relative_to(ROOT)}:{line}: ", text, comment)
        for header in HEADERS
        for line, text, comment in declarations(header.read_text())
    ]
    bare = [place + text for place, text, comment in found if not comment]
    advice = "write a comment with /// above these declarations, or with ///< behind them"
    assert not bare, "\n".join([advice, *bare])
    wrong = [
        place + name
        for place, text, comment in found
        for name in re.findall(r"\\param (\w+)", comment)
        if not re.search(rf"\b{name}\b", text)
    ]
    assert not wrong, "\n".join(["these names after \\param are no parameters", *wrong])
