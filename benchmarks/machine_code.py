"""Reads the machine code of CUDA kernels: their registers, loops, and instructions per turn."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", re.MULTILINE)
# A conditional branch has a predicate before or after its name.
BRANCH = re.compile(r"(@!?U?P\d+ )?BRA\S* +(\S+, )?(0x[0-9a-f]+)")


class MachineCode:
    """The kernels of a library for one architecture, for example sm_90, by mangled name."""

    def __init__(self, cuobjdump: str, library: Path, arch: str) -> None:
        self.arch = arch
        self.number = int(arch.removeprefix("sm_"))
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
    """Return the instructions for one whole row of a kernel that holds rows in registers.

    The row is aligned and fills its team: one load of 16 bytes per pack follows the other, and so
    do the stores at the end. Each logit has two exponentials, one for the sum and one for the
    gradient. Rare branches, for example the one for the target class, are not on this way.
    """
    # An unaligned row has one load more than an aligned one.
    packs = sorted(loads_in_flight(code))[-2]
    texts, jumps = _instructions(code)
    last = _groups(texts, r"\bSTG\.E\.128", packs)[0][-1]
    exponential = re.compile(r"\bMUFU\.EX2")
    ways = [
        by_number[16 * packs]
        for loads in _groups(texts, r"\bLDG\.E\.128", packs)
        if 16 * packs in (by_number := _ways(texts, jumps, loads[0], last, exponential))
    ]
    # Unaligned rows need more instructions, between their loads and the first exponential.
    return [texts[index] for index in min(ways, key=len)]


def loads_in_flight(code: str) -> list[int]:
    """Return the numbers of 16-byte loads that follow each other without a branch between them."""
    texts, jumps = _instructions(code)
    runs = [0]
    for index, text in enumerate(texts):
        if re.search(r"\bLDG\.E\.128", text):
            runs[-1] += 1
        elif index in jumps and runs[-1] > 0:
            runs.append(0)
    return runs


def _groups(texts: list[str], pattern: str, size: int) -> list[list[int]]:
    # Returns indices of `size` instructions that are close together, the closest ones first.
    found = [index for index, text in enumerate(texts) if re.search(pattern, text)]
    groups = [found[i : i + size] for i in range(len(found) - size + 1)]
    close = [group for group in groups if group[-1] - group[0] < 6 * size]
    return sorted(close, key=lambda group: group[-1] - group[0])


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
    turns = [
        Turn(len(way), found, texts[first : last + 1])
        for found, way in _ways(texts, jumps, first, last, counted).items()
        if found
    ]
    return sorted(turns, key=lambda turn: turn.instructions / turn.counted)[:1]


def _ways(
    texts: list[str],
    jumps: dict[int, tuple[int, bool]],
    first: int,
    last: int,
    counted: re.Pattern[str],
) -> dict[int, list[int]]:
    # Returns the shortest ways without a jump back, by the number of counted instructions before
    # the last one.
    lengths: dict[int, dict[int, int]] = {first: {0: 1}}  # by instruction and number
    came_from: dict[tuple[int, int], tuple[int, int]] = {}
    for index in range(first, last):
        to, is_conditional = jumps.get(index, (index + 1, False))
        following = {to, index + 1} if is_conditional else {to}
        for before, length in lengths.get(index, {}).items():
            found = before + bool(counted.search(texts[index]))
            for after in following:
                known = lengths.setdefault(after, {})
                if index < after <= last and length + 1 < known.get(found, length + 2):
                    known[found] = length + 1
                    came_from[after, found] = (index, before)
    ways = {}
    for found in lengths.get(last, {}):
        at = (last, found)
        way = [last]
        while at in came_from:
            at = came_from[at]
            way.append(at[0])
        ways[found] = way[::-1]
    return ways
