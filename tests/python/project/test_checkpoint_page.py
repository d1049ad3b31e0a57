"""The programs of the page about checkpoints go on where they stopped, with the same losses."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from packaging_tools import END_OF_RANK, PACKAGE, ROOT, environment, run

PLAIN, TRAINER, DISTRIBUTED = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/checkpoints.md").read_text(), re.DOTALL
)
(CPP,) = re.findall(r"```cpp\n(.*?)```", (ROOT / "docs/checkpoints.md").read_text(), re.DOTALL)
PACKAGES = environment(PYTHONPATH=str(PACKAGE.parent))


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("*/step-*"))


def forget(folder: Path, *removed: int) -> None:
    for step in removed:
        shutil.rmtree(folder / "run" / f"step-{step:08}")


def test_loop_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN + "print(start, loss.item())")
    first, last = run(sys.executable, script, cwd=tmp_path, env=PACKAGES).split()
    assert first == "0"
    assert steps(tmp_path) == [60, 80, 100]
    forget(tmp_path, 80, 100)
    assert run(sys.executable, script, cwd=tmp_path, env=PACKAGES).split() == ["60", last]


@pytest.mark.slow
def test_trainer_saves_when_it_is_told_to_stop_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    expected = run(sys.executable, "train.py", cwd=tmp_path, env=PACKAGES).splitlines()
    assert len(expected) == 20
    assert expected[-1].startswith("step 2000: loss ")
    assert run(sys.executable, "train.py", cwd=tmp_path, env=PACKAGES) == ""
    shutil.rmtree(tmp_path / "trainer")

    program = subprocess.Popen(
        [sys.executable, "train.py"], cwd=tmp_path, env=PACKAGES, stdout=subprocess.PIPE, text=True
    )
    while not steps(tmp_path):
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGTERM)
    text, _ = program.communicate(timeout=60)
    assert program.returncode == 1
    assert 100 <= steps(tmp_path)[-1] < 2000
    rest = run(sys.executable, "train.py", cwd=tmp_path, env=PACKAGES)
    assert [*text.splitlines(), *rest.splitlines()] == expected


@pytest.mark.slow
def test_distributed_program_goes_on_with_the_same_and_with_another_number_of_processes(
    tmp_path: Path,
) -> None:
    # Lines that two processes print at once may be mixed, so each has a file.
    shown = "open(f'loss-{dist.get_rank()}', 'w').write(f'{start} {loss.item()}')\n"
    program = DISTRIBUTED.replace("dist.barrier()", f"{shown}dist.barrier()")
    joined = (
        "\nimport threading\n[t.join() for t in threading.enumerate() if t.name == 'checkpoint']"
    )
    program += joined + END_OF_RANK
    (tmp_path / "train.py").write_text(program)

    def train(processes: int) -> list[list[str]]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        run(*command, "--nproc-per-node", str(processes), "train.py", cwd=tmp_path, env=PACKAGES)
        return [(tmp_path / f"loss-{rank}").read_text().split() for rank in range(processes)]

    first = train(2)
    assert [start for start, _ in first] == ["0", "0"]
    forget(tmp_path, 40, 60)
    assert train(2) == [["20", loss] for _, loss in first]
    forget(tmp_path, 40, 60)
    assert train(1)[0][0] == "20"
    assert steps(tmp_path) == [20, 40, 60]


@pytest.mark.slow
def test_cpp_program_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    # It removes its first checkpoint, and links libtorch.so first, as ${TORCH_LIBRARIES} does.
    (tmp_path / "main.cpp").write_text(CPP.replace("keep(3)", "keep(2)"))
    library = Path(torch.__path__[0]) / "lib" / "libtorch.so"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(train CXX)\nfind_package(ampfuse REQUIRED)\n"
        f"add_executable(train main.cpp)\ntarget_link_libraries(train {library} ampfuse::ampfuse)\n"
    )
    headers = ROOT / ".venv" / "cpp-headers" / "usr" / "include"
    options = [f"-DCMAKE_PREFIX_PATH={PACKAGE}", f"-DCMAKE_CXX_FLAGS=-isystem {headers}"]
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja", *options)
    run("cmake", "--build", tmp_path / "build")
    program = tmp_path / "build" / "train"
    first, last = run(program, cwd=tmp_path, env=environment()).split()
    assert first == "0"
    assert steps(tmp_path) == [40, 60]
    forget(tmp_path, 60)
    assert run(program, cwd=tmp_path, env=environment()).split() == ["40", last]
