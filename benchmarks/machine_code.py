"""Reads the machine code of a kernel: its innermost loops, and the instructions of their turns."""

import re
from dataclasses import dataclass

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", re.MULTILINE)
BRANCH = re.compile(r"(@!?U?P\d+ )?BRA\S* .*?(0x[0-9a-f]+)")


@dataclass(frozen=True)
class Turn:
    """A way through a loop, from its first instruction to the branch back."""

    instructions: int
    counted: int  # how many of them are of the kind asked for
    loop: list[str]  # all instructions of the loop


def shortest_turns(code: str, counted: str) -> list[Turn]:
    """Return the turn with the fewest instructions per counted one, for each innermost loop.

    Loops without counted instructions are left out. Rare branches, for example the one for the
    target class, take longer turns, so they are not in the shortest one.
    """
    listed = INSTRUCTION.findall(code)
    texts = [text for _, text in listed]
    index_of = {int(address, 16): index for index, (address, _) in enumerate(listed)}
    jumps = {
        index: (index_of[int(found[2], 16)], found[1] is not None)
        for index, text in enumerate(texts)
        if (found := BRANCH.match(text))
    }
    loops = [(to, index) for index, (to, _) in jumps.items() if to <= index]
    turns = []
    for first, last in sorted(loops):
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops):
            turns += _turns(texts, jumps, first, last, re.compile(counted))
    return turns


def _turns(
    texts: list[str],
    jumps: dict[int, tuple[int, bool]],
    first: int,
    last: int,
    counted: re.Pattern[str],
) -> list[Turn]:
    # For each instruction: the fewest instructions before it, by the number of counted ones.
    reach: dict[int, dict[int, int]] = {first: {0: 0}}
    for index in range(first, last):
        to, is_conditional = jumps.get(index, (index + 1, False))
        following = {to, index + 1} if is_conditional else {to}
        for before, length in reach.get(index, {}).items():
            found = before + bool(counted.search(texts[index]))
            for after in following:
                if index < after <= last:
                    lengths = reach.setdefault(after, {})
                    lengths[found] = min(lengths.get(found, length + 1), length + 1)
    turns = [
        Turn(length + 1, found, texts[first : last + 1])
        for found, length in reach.get(last, {}).items()
        if found
    ]
    return sorted(turns, key=lambda turn: turn.instructions / turn.counted)[:1]
