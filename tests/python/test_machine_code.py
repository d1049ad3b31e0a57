"""What the CUDA compiler made of the kernels, read from its own reports: no GPU needed.

Speed itself can only be measured on a GPU; that memory is moved 16 bytes at a time and that nothing
spills can be seen here.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TORCH_INCLUDE = Path(torch.__file__).parent / "include"

NORMS = [
    f"multi_tensor_norm_kernel<math::NormType::{norm}, {scalar}>"
    for norm in ("kL1", "kL2", "kInf")
    for scalar in ("c10::Half", "c10::BFloat16", "float", "double")
]
FINISHES = [
    f"multi_tensor_norm_finish_kernel<math::NormType::{norm}, float>"
    for norm in ("kL1", "kL2", "kInf")
]
WRITERS = [
    kernel
    for scalar in ("c10::Half", "c10::BFloat16", "float", "double")
    for kernel in (
        f"multi_tensor_unscale_kernel<{scalar}>",
        f"multi_tensor_unscale_norm_kernel<math::NormType::kL2, {scalar}>",
        f"multi_tensor_clip_kernel<{scalar}, float>",
    )
]


def find_tool(name: str) -> str | None:
    """nvcc from the toolkit or torch's packages; cuobjdump from the toolkit or triton."""
    site = Path(torch.__file__).parents[1]
    folders = [Path("/usr/local/cuda/bin"), *site.glob("nvidia/cu*/bin")]
    folders += [site / "triton" / "backends" / "nvidia" / "bin"]
    found = [folder / name for folder in folders if (folder / name).exists()]
    return shutil.which(name) or (str(found[0]) if found else None)


NVCC = find_tool("nvcc")
CUOBJDUMP = find_tool("cuobjdump")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NVCC is None, reason="there is no nvcc"),
    pytest.mark.skipif(CUOBJDUMP is None, reason="there is no cuobjdump"),
]


class MachineCode:
    """The kernels compiled for one architecture."""

    def __init__(self, arch: str, folder: Path) -> None:
        source, cubin = folder / "kernels.cu", folder / "kernels.cubin"
        names = [*NORMS, *FINISHES, *WRITERS]
        pointers = "\n".join(f"auto kernel{i} = &{name};" for i, name in enumerate(names))
        source.write_text(
            "#include <torch/headeronly/util/BFloat16.h>\n"
            "#include <torch/headeronly/util/Half.h>\n"
            '#include "cuda/multi_tensor_clip.cuh"\n'
            f"namespace ampfuse {{\n{pointers}\n}}\n"
        )
        command = [
            NVCC,
            "-std=c++20",
            f"-arch={arch}",
            "-cubin",
            "-Xptxas=-v",
            "--expt-relaxed-constexpr",
        ]
        command += [f"-I{ROOT / 'csrc'}", f"-I{TORCH_INCLUDE}", "-o", cubin, source]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        self.report = done.stderr
        self.sass = subprocess.run(
            [CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True
        ).stdout

    def functions(self, stem: str) -> dict[str, str]:
        """SASS of every kernel whose mangled name has `stem` as a whole identifier."""
        parts = re.split(r"Function : (\S+)", self.sass)[1:]
        wanted = f"{len(stem)}{stem}"
        found = {
            name: body for name, body in zip(parts[::2], parts[1::2], strict=True) if wanted in name
        }
        assert found, f"no kernel is called {stem}"
        return found


@pytest.fixture(scope="module", params=["sm_80", "sm_90"])
def code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MachineCode:
    return MachineCode(request.param, tmp_path_factory.mktemp(request.param))


def test_no_kernel_spills_or_has_a_stack(code: MachineCode) -> None:
    frames = re.findall(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", code.report
    )
    assert len(frames) >= len(NORMS) + len(FINISHES) + len(WRITERS)
    assert set(frames) == {("0", "0", "0")}


def test_four_blocks_of_registers_fit_a_multiprocessor(code: MachineCode) -> None:
    # 65,536 registers for 4 blocks of 256 threads.
    registers = [int(used) for used in re.findall(r"Used (\d+) registers", code.report)]
    assert max(registers) <= 64


@pytest.mark.parametrize(
    "stem", ["multi_tensor_norm_kernel", "multi_tensor_unscale_kernel", "multi_tensor_clip_kernel"]
)
def test_hot_loops_load_16_bytes_at_a_time_and_four_times_before_use(
    code: MachineCode, stem: str
) -> None:
    for name, body in code.functions(stem).items():
        instructions = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", body, re.MULTILINE)
        loads = [i for i, text in enumerate(instructions) if re.search(r"\bLDG\.E\.128", text)]
        # Four loads within a few instructions of each other: all are on their way at once.
        assert any(loads[i + 3] - loads[i] <= 12 for i in range(len(loads) - 3)), name
        assert not re.search(r"\b(LDL|STL)\b", body), name


@pytest.mark.parametrize(
    "stem",
    ["multi_tensor_unscale_kernel", "multi_tensor_unscale_norm_kernel", "multi_tensor_clip_kernel"],
)
def test_what_is_written_back_is_stored_16_bytes_at_a_time(code: MachineCode, stem: str) -> None:
    for name, body in code.functions(stem).items():
        assert len(re.findall(r"\bSTG\.E\.128", body)) >= 4, name


def test_norms_without_unscaling_store_no_elements(code: MachineCode) -> None:
    # Partials and ranges are all that is stored.
    for name, body in code.functions("multi_tensor_norm_kernel").items():
        assert len(re.findall(r"\bSTG\b", body)) <= 6, name
