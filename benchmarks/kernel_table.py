"""Prints what the machine code of each CUDA kernel needs; no GPU is needed.

    python benchmarks/kernel_table.py [--match 'cross_entropy_forward.*BFloat16'] [--arch sm_90]
    python benchmarks/kernel_table.py --before other/libampfuse_cuda.so  # "before → after"

- registers  per thread
- threads    resident on a multiprocessor, as registers allow
- turns      for each innermost loop: instructions per load of 8 or 16 bytes, or per such store;
             for a kernel that holds rows in registers: instructions per load of 16 bytes, from
             an aligned row's first load to its last store
- in flight  most KiB that the resident threads have requested and not yet received
"""

import argparse
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import ampfuse
from machine_code import MachineCode, Turn, held_row, shortest_turns

REGISTERS = 65536  # of a multiprocessor
MOST_THREADS = {"sm_86": 1536, "sm_89": 1536, "sm_120": 1536}  # of a multiprocessor; others 2048
BLOCK = 256  # threads per block, if the name of the kernel does not say otherwise
WIDE = r"\.E\.(EF\.)?(64|128)"


def demangled(names: list[str]) -> list[str]:
    """Return the kernels' names without namespaces and parameters."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    short = []
    for line in text.stdout.splitlines():
        name = re.sub(r"(ampfuse|c10|math)::|\((?=\w+\)\d)|void ", "", line.split(">(")[0])
        name = re.sub(r"(LaneTeam<\d+), \w+>", r"\1>", name)
        short.append(re.sub(r"\w+\)(\d)", r"\1", name).rstrip(">") + (">" if "<" in name else ""))
    return short


def resident_threads(name: str, registers: int, arch: str) -> int:
    """Return the threads that a multiprocessor holds."""
    found = re.search(r"BlockTeamILi(\d+)E", name)
    block = int(found[1]) if found else BLOCK
    per_warp = -(-registers * 32 // 256) * 256  # registers are allocated 256 at a time
    warps = REGISTERS // per_warp // (block // 32) * (block // 32)
    return min(warps * 32, MOST_THREADS.get(arch, 2048) // block * block)


def described(turn: Turn) -> str:
    """Return the instructions per wide load or store of a loop, and what the loop moves."""
    moves = [
        what
        for what, pattern in (("LDG", r"\bLDG"), ("LDS", r"\bLDS"), ("STG", r"\bSTG"))
        if any(re.search(pattern, text) for text in turn.loop)
    ]
    return f"{turn.instructions / turn.counted:.0f} ({'+'.join(moves)})"


def adds_blocks(turn: Turn) -> bool:
    """Return True for a loop over numbers of blocks, which runs once per launch."""
    text = "\n".join(turn.loop)
    return "DADD" in text and not re.search(r"\b(MUFU|FFMA|STG)", text)


def cells(name: str, code: MachineCode) -> list[str]:
    """Return what the table says about a kernel."""
    body = code.sass[name]
    registers = code.registers(name)
    threads = resident_threads(name, registers, code.arch)
    if re.search("RowWorkE[23]", name):
        row = held_row(body)
        packs = sum("MUFU.EX2" in text for text in row) // 16  # two for each of eight logits
        turns = f"{len(row) / packs:.0f} (LDG+STG)"
        return [str(registers), str(threads), turns, f"{16 * packs * threads / 1024:.0f}"]
    loops: dict[tuple[str, ...], str] = {}
    for pattern in (rf"\bSTG{WIDE}", rf"\bLDG{WIDE}"):  # the latter decides if a loop has both
        loops |= {
            tuple(turn.loop): described(turn)
            for turn in shortest_turns(body, pattern)
            if not ("cross_entropy_forward" in name and adds_blocks(turn))
        }
    requested: Counter[tuple[str, ...]] = Counter()  # bytes per turn, by loop
    for width, bits in ((8, "64"), (16, "128")):
        for turn in shortest_turns(body, rf"\bLDG\.E\.{bits}"):
            requested[tuple(turn.loop)] += width * turn.counted
    most = max(requested.values(), default=0)
    turns = ", ".join(sorted(set(loops.values())))
    return [str(registers), str(threads), turns, f"{most * threads / 1024:.0f}"]


def kernels(code: MachineCode, match: str) -> dict[str, list[str]]:
    """Return what the table says about each kernel whose name matches, by name."""
    names = dict(zip(demangled(sorted(code.sass)), sorted(code.sass), strict=True))
    return {short: cells(name, code) for short, name in names.items() if re.search(match, short)}


def table(code: MachineCode, before: MachineCode | None, match: str) -> list[str]:
    """Return the table's rows for one kind of GPU."""
    earlier = {} if before is None else kernels(before, match)
    rows = []
    for name, now in kernels(code, match).items():
        then = earlier.get(name, now)
        changes = [b if a == b else f"{a} → {b}" for a, b in zip(then, now, strict=True)]
        rows.append("| " + " | ".join([name, code.arch, *changes]) + " |")
    return rows


def main() -> None:
    """Print the table."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    library = next(Path(ampfuse.__file__).parent.glob("lib/libampfuse_cuda.so.*"), None)
    parser.add_argument("--library", type=Path, default=library, help="the installed one")
    parser.add_argument("--before", type=Path, help="a library to compare with")
    parser.add_argument("--match", default=".", help="regular expression for kernels' names")
    parser.add_argument("--arch", action="append", help="all for which the library was built")
    options = parser.parse_args()
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        import triton  # type: ignore[import-untyped]

        cuobjdump = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    built_for = re.findall(r"\d+", str(ampfuse.build_info()["cuda_archs"]))
    print("| kernel | GPU | registers | threads | turns | KiB in flight |")
    print("| --- | --- | --- | --- | --- | --- |")
    for arch in options.arch or [f"sm_{number}" for number in built_for]:
        code = MachineCode(cuobjdump, options.library, arch)
        before = options.before and MachineCode(cuobjdump, options.before, arch)
        print("\n".join(table(code, before, options.match)))


if __name__ == "__main__":
    main()
