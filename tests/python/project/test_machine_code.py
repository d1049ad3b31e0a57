"""The machine code of the CUDA kernels, read from the built library: no GPU is needed.

Speed can only be measured on a GPU. These tests check that kernels move memory 16 bytes at a time
and do not spill registers.
"""

import re
import subprocess

import ampfuse
import kernel_table
import pytest
from machine_code import INSTRUCTION, MachineCode, held_row, loads_in_flight, shortest_turns
from packaging_tools import KERNELS, ROOT, find_tool

CUOBJDUMP = find_tool("cuobjdump")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.machine_code,
    pytest.mark.skipif(not ampfuse.has_cuda(), reason="this build has no CUDA kernels"),
    pytest.mark.skipif(CUOBJDUMP is None, reason="there is no cuobjdump"),
]


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def code(request):
    built_for = ampfuse.build_info()["cuda_archs"]
    if request.param.removeprefix("sm_") not in re.findall(r"\d+", built_for):
        pytest.skip(f"this build is for {built_for}")
    return MachineCode(CUOBJDUMP, KERNELS, request.param)


def test_every_kernel_in_the_sources_is_in_the_library(code):
    sources = "".join(file.read_text() for file in (ROOT / "csrc" / "cuda").glob("*.cuh"))
    kernels = re.findall(r"__global__[^{;]*?\b(\w+_kernel)\(", sources)
    assert kernels
    for name in kernels:
        code.functions(name)
    assert set(code.resources) == set(code.sass)


def test_no_kernel_spills_or_has_a_stack(code):
    # Spilled registers are stored on the stack.
    for name, used in code.resources.items():
        assert re.search(r"STACK:0 .*LOCAL:0\b", used), name
        assert not any(spill in code.sass[name] for spill in (" LDL", " STL")), name


def test_kernels_declare_no_more_shared_memory_than_launches_leave_them(code):
    header = (ROOT / "csrc" / "cuda" / "launch.cuh").read_text()
    left = int(re.search(r"kMostStaticShared = (\d+);", header)[1])
    for name, used in code.resources.items():
        used_by_system = 1024 if code.number >= 90 else 0
        assert int(re.search(r"SHARED:(\d+)", used)[1]) <= used_by_system + left, name


# Registers per thread of the cross-entropy kernels that need more than 64: those of doubles, those
# that hold more than 32 logits, and those that compute more than exponentials (RowWork::kGeneral);
# and of extended steps, and of the step of doubles with three moments.
WIDE = {
    128: r"(cross_entropy_(for|back)ward|shards_reduce)_kernelI"
    r"(d|.*BlockTeamILi512E.*RowWorkE1|.*RowWorkE3)",
    80: r"(cross_entropy|shards_reduce)_.*RowWorkE1|fused_step_kernel.*(AnyType|RuleEddd.*Li3E)",
}


def test_registers_of_resident_threads_fit_a_multiprocessor(code):
    # 65,536 registers serve 1024 threads with 64 each, 768 threads with 80, or 512 with 128.
    for name in code.resources:
        allowed = next((count for count, names in WIDE.items() if re.search(names, name)), 64)
        assert code.registers(name) <= allowed, name


@pytest.mark.parametrize("kind", ["norm", "unscale", "clip"])
def test_hot_loops_load_16_bytes_at_a_time_and_four_times_before_use(code, kind):
    for name, body in code.functions(f"multi_tensor_{kind}_kernel").items():
        instructions = [text for _, text in INSTRUCTION.findall(body)]
        loads = [i for i, text in enumerate(instructions) if "LDG.E.128" in text]
        # Four loads within 12 instructions are all in flight at once.
        assert any(loads[i + 3] - loads[i] <= 12 for i in range(len(loads) - 3)), name


def test_the_table_of_kernels_has_a_row_for_each_kernel_asked_for(code):
    rows = kernel_table.table(code, code, "multi_tensor_clip_kernel")
    assert len(rows) == len(code.functions("multi_tensor_clip_kernel"))
    assert all(f"| {code.arch} |" in row and "→" not in row for row in rows)
    assert all("(LDG+STG)" in row for row in rows)


PLACES = "LaneTeamILi1E"  # one thread per row, for rows whose classes are far apart in memory


def forward_kernels(code):
    return code.functions("cross_entropy_forward_kernel")


def test_rows_of_logits_are_moved_and_kept_in_shared_memory_16_bytes_at_a_time(code):
    # Strings are searched much faster than patterns, in megabytes of code.
    for name, body in forward_kernels(code).items():
        assert " LDS.128" in body, name
        assert " STS.128" in body, name
        if PLACES in name:
            continue
        # Both the pass for the loss and the pass for the gradient (of packs that shared memory has
        # not kept) have one load for aligned packs, and two for packs across 16-byte boundaries.
        # Kernels of doubles have two loads in total.
        assert body.count(" LDG.E.128") >= (2 if "kernelId" in name else 6), name
        assert " STG.E.128" in body or " STG.E.EF.128" in body, name


def plain_kernels(code, logits):
    """Return the kernels that compute only exponentials, except those for positions."""
    wanted = re.compile(rf"kernelI{logits}(?!.*{PLACES}).*RowWorkE0")
    found = {name: body for name, body in forward_kernels(code).items() if wanted.search(name)}
    assert found
    return found


def test_16_bit_logits_take_fewer_than_16_instructions_each(code):
    for name, body in plain_kernels(code, "N3c10").items():
        turns = shortest_turns(body, r"\bMUFU\.EX2")
        for pass_stores, most in ((False, 7.7), (True, 7.8)):
            ratios = [
                turn.instructions / turn.counted
                for turn in turns
                if any("STG" in text for text in turn.loop) == pass_stores
            ]
            assert min(ratios) <= most, (name, pass_stores, ratios)


# By their work: how many kernels, packs per thread, and the most instructions per logit.
HELD = {"RowWorkE2": (2 * 6, 4, 21), "RowWorkE3": (1 * 4, 8, 14)}


def held_kernels(code):
    """Yield name, code, packs per thread and most instructions per logit of each kernel."""
    for work, (count, packs, most) in HELD.items():
        found = {name: body for name, body in forward_kernels(code).items() if work in name}
        assert len(found) == count
        for name, body in found.items():
            yield name, body, packs, most


def test_all_loads_of_a_held_row_are_in_flight_at_once(code):
    for name, body, packs, _ in held_kernels(code):
        # A load per pack for aligned rows. Others have one more: the upper block of the first pack.
        aligned, unaligned = sorted(loads_in_flight(body))[-2:]
        assert (aligned, unaligned) == (packs, packs + 1), (name, loads_in_flight(body))


def test_a_held_row_takes_at_most_21_instructions_per_logit_and_14_if_there_are_64(code):
    for name, body, packs, most in held_kernels(code):
        row = held_row(body)
        # Each logit takes one exponential for the sum, and one for the gradient.
        assert sum("MUFU.EX2" in text for text in row) == 16 * packs, name
        assert sum("BAR.SYNC" in text for text in row) <= 2, name
        assert not any(re.search(r"MEMBAR|UCGABAR|\bCCTL", text) for text in row), name
        assert not any(re.search(r"\b(LDS|STS)\.128", text) for text in row), name
        # From the first load to the last store, with the sums over the team. In the second kind of
        # kernel, this thread has neither the loss, with its logarithms, nor the target.
        assert len(row) / (8 * packs) <= most, (name, len(row))


def test_float_logits_take_at_most_45_instructions_each(code):
    for name, body in plain_kernels(code, "f").items():
        first = shortest_turns(body, r"\bFMNMX")  # one per logit, for the largest one
        assert min(turn.instructions / turn.counted for turn in first) <= 36.5, name
        second = [
            turn.instructions / (4 * turn.counted)
            for turn in shortest_turns(body, r"\bSTG\.E\.(EF\.)?(128|64)")
            if any("LDS.128" in text for text in turn.loop)
        ]
        assert min(second) <= 8.5, (name, second)


def test_16_bit_logits_need_few_stores_of_elements_and_little_double_precision(code):
    # Single elements are stored before the first pack and after the last one: of zeros, and of a
    # gradient.
    for name, body in plain_kernels(code, "N3c10").items():
        assert body.count(" STG.E.U16") <= 6, name
    # Most GPUs have few fp64 units. A row may need a few additions and one division, no logarithm.
    for name, body in forward_kernels(code).items():
        if re.search(r"kernelIN3c10.*RowWorkE0", name):
            assert body.count(" DFMA") < 30, name
            assert body.count(" DADD") + body.count(" DMUL") < 80, name


@pytest.mark.parametrize("kind", ["unscale", "unscale_norm", "clip", "norm"])
def test_kernels_of_lists_write_elements_back_16_bytes_at_a_time_or_not_at_all(code, kind):
    for name, body in code.functions(f"multi_tensor_{kind}_kernel").items():
        if kind == "norm":  # stores only partials and ranges
            assert body.count(" STG") <= 6, name
        else:
            assert body.count(" STG.E.128") >= 4, name


WIDTHS = {"float": 4, "c10::BFloat16": 2, "c10::Half": 2, "unsigned short": 2, "signed char": 1}
STEP = re.compile(
    r"StepTypes<ampfuse::math::\w+Rule, ([\w: ]+), ([\w: ]+), ([\w: ]+), "
    r"\(ampfuse::Master\)(\d), (\d)>"
)


def step_kernels(code):
    """Yield each kernel of an optimizer with the columns that it reads and writes, and its pack.

    A column is given as bytes per element, a pack as the elements per access. The first column that
    is read is the gradient's; it is 0 for extended steps, which choose its type when they run.
    Kernels of doubles are left out: they update elements one by one.
    """
    kernels = {
        name: body
        for name, body in code.functions("fused_step_kernel").items()
        if "RuleEd" not in name
    }
    names = "\n".join(kernels)
    done = subprocess.run(["c++filt"], input=names, capture_output=True, text=True, check=True)
    for (name, body), demangled in zip(kernels.items(), done.stdout.splitlines(), strict=True):
        param, grad, state, master, count = STEP.search(demangled).groups()
        moments = [WIDTHS[state]] * int(count)
        of_master = {"0": [], "1": [4], "2": [2]}[master]
        of_param = [WIDTHS[param]]
        reads = [WIDTHS.get(grad, 0), *moments, *of_master, *(of_param if master != "1" else [])]
        writes = [*moments, *of_master, *of_param]
        yield name, body, reads, writes, 2 if len(moments) == 3 else 4


def test_steps_move_each_column_in_one_access_of_4_elements_and_2_with_three_moments(code):
    for name, body, reads, writes, pack in step_kernels(code):
        for instruction, columns in (("LDG", reads), ("STG", writes)):
            for width in {*columns} - {0}:
                suffix = {4: "", 8: r"\.64", 16: r"\.128"}[width * pack]
                found = re.findall(rf"\b{instruction}\.E{suffix}(?![.\d])", body)
                assert len(found) >= columns.count(width), (name, instruction, width)


def test_steps_never_load_a_16_bit_copy_of_their_masters(code):
    looked_at = 0
    for name, body, (grad, *others), _, pack in step_kernels(code):
        # Gradients have 16 bits, masters and moments 32: only gradients take loads of 8 bytes, and
        # once per chunk the values that its elements share.
        if grad != 2 or {*others} != {4} or pack != 4:
            continue
        loads = [len(re.findall(rf"\bLDG\.E\.{bits}(?!\d)", body)) for bits in (64, 128)]
        of_each = loads[1] // len(others)
        assert loads[1] == of_each * len(others) > 0, name
        assert of_each <= loads[0] <= of_each + 1, name
        looked_at += 1
    # fp16 and bf16 gradients; fp32 parameters, fp16 and bf16 copies; Adam, SGD without and with
    # momentum
    assert looked_at == 18
