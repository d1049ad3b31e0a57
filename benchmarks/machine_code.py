"""Reads the machine code of CUDA kernels: their registers, loops, and instructions per turn."""

import re
import subprocess
from collections import deque
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", re.MULTILINE)
# A conditional branch has a predicate before or after its name.
BRANCH = re.compile(r"(@!?U?P\d+ )?BRA\S* +(\S+, )?(0x[0-9a-f]+)")


class MachineCode:
    """The kernels of a library for one architecture, for example sm_90, by mangled name."""

    def __init__(self, cuobjdump: str, library: Path, arch: str) -> None:
        self.arch = arch
        self.resources, self.sass = (
            _dump([cuobjdump, what, "-arch", arch, str(library)])
            for what in ("-res-usage", "-sass")
        )

    def functions(self, stem: str) -> dict[str, str]:
        """Return the SASS of each kernel whose mangled name has `stem` as a whole identifier."""
        wanted = f"{len(stem)}{stem}"
        found = {name: body for name, body in self.sass.items() if wanted in name}
        assert found, f"no kernel is called {stem}"
        return found

    def registers(self, name: str) -> int:
        """Return the registers per thread of a kernel."""
        return int(re.search(r"REG:(\d+)", self.resources[name])[1])  # type: ignore[index]


def _dump(command: list[str]) -> dict[str, str]:
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    parts = re.split(r"Function ?:? (\w+):?", text)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


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
    texts, jumps = _instructions(code)
    loops = [(to, index) for index, (to, _) in jumps.items() if to <= index]
    turns = []
    for first, last in sorted(loops):
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in loops):
            turns += _turns(texts, jumps, first, last, re.compile(counted))
    return turns


def held_row(code: str) -> list[str]:
    """Return the instructions for one row of a kernel that holds rows in registers.

    The row is aligned: four loads of 16 bytes follow each other, and at the end four such stores.
    Rare branches, for example the one for the target class, are not on this way.
    """
    texts, jumps = _instructions(code)
    start = _four(texts, r"\bLDG\.E\.128")[0]
    last = _four(texts, r"\bSTG\.E\.128")[-1]
    came_from = {start: start}
    waiting = deque([start])
    while waiting:
        index = waiting.popleft()
        if index == last:
            break
        to, is_conditional = jumps.get(index, (index + 1, False))
        for after in {to, index + 1} if is_conditional else {to}:
            if after not in came_from and after < len(texts):
                came_from[after] = index
                waiting.append(after)
    way = [index]
    while way[-1] != start:
        way.append(came_from[way[-1]])
    return [texts[index] for index in reversed(way)]


def _four(texts: list[str], pattern: str) -> list[int]:
    found = [index for index, text in enumerate(texts) if re.search(pattern, text)]
    groups = [found[i : i + 4] for i in range(len(found) - 3)]
    return min(groups, key=lambda group: group[-1] - group[0])


def _instructions(code: str) -> tuple[list[str], dict[int, tuple[int, bool]]]:
    # Returns the instructions, and for each branch where it leads and whether it is conditional.
    listed = INSTRUCTION.findall(code)
    index_of = {int(address, 16): index for index, (address, _) in enumerate(listed)}
    jumps = {
        index: (index_of[int(found[3], 16)], found[1] is not None or found[2] is not None)
        for index, (_, text) in enumerate(listed)
        if (found := BRANCH.match(text))
    }
    return [text for _, text in listed], jumps


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
