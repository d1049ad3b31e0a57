"""A fault that the tests are expected to notice."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A small change to one file, and the behaviour that it breaks."""

    breaks: str  # a sentence
    file: str
    old: str  # occurs exactly once in the file
    new: str
    tests: str  # what may notice: folders or files for pytest, names of ctest's tests
