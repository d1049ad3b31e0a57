"""The programs of docs/checkpoints.md go on where they stopped, with the same losses."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import warm
from packaging_tools import END_OF_RANK, built_program, environment, run, run_python
from pages import code_block, code_blocks

PLAIN, TRAINER, DISTRIBUTED = code_blocks("python", "docs/checkpoints.md")


def steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("*/step-*"))


def forget(folder, *removed):
    for step in removed:
        shutil.rmtree(folder / "run" / f"step-{step:08}")


def test_loop_goes_on_from_its_last_checkpoint(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PLAIN + "print(start, loss.item())")
    printed = run_python(script, cwd=tmp_path).splitlines()
    first, last = printed[-1].split()
    assert first == "0"
    assert [line.split(":")[0] for line in printed[:-1]] == [
        f"step {i}" for i in range(20, 101, 20)
    ]
    assert steps(tmp_path) == [60, 80, 100]
    forget(tmp_path, 80, 100)
    assert run_python(script, cwd=tmp_path).splitlines() == [*printed[3:-1], f"60 {last}"]


@pytest.mark.slow
def test_trainer_saves_when_it_is_told_to_stop_and_goes_on(tmp_path):
    (tmp_path / "train.py").write_text(TRAINER.replace("steps=2000", "steps=1000"))
    expected = run_python("train.py", cwd=tmp_path).splitlines()
    assert len(expected) == 10
    assert expected[-1].startswith("step 1000: loss ")
    assert run_python("train.py", cwd=tmp_path) == ""
    shutil.rmtree(tmp_path / "trainer")

    command = [warm.python(), "train.py"]
    program = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while not steps(tmp_path):
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGTERM)
    text, _ = program.communicate(timeout=60)
    assert program.returncode == 1
    assert 100 <= steps(tmp_path)[-1] < 1000
    rest = run_python("train.py", cwd=tmp_path)
    assert [*text.splitlines(), *rest.splitlines()] == expected


@pytest.mark.slow
def test_distributed_program_goes_on_with_the_same_and_with_another_number_of_processes(tmp_path):
    # Lines that two processes print at once may be mixed, so each has a file.
    shown = "open(f'loss-{dist.get_rank()}', 'w').write(f'{start} {loss.item()}')\n"
    joined = "import threading\n[t.join() for t in threading.enumerate() if t.name == 'checkpoint']"
    program = DISTRIBUTED.replace("dist.barrier()", f"{shown}dist.barrier()")
    (tmp_path / "train.py").write_text(f"{program}\n{joined}{END_OF_RANK}")

    def train(processes):
        run_python(*warm.TORCHRUN, "--nproc-per-node", str(processes), "train.py", cwd=tmp_path)
        return [(tmp_path / f"loss-{rank}").read_text().split() for rank in range(processes)]

    first = train(2)
    assert [start for start, _ in first] == ["0", "0"]
    forget(tmp_path, 40, 60)
    assert train(2) == [["20", loss] for _, loss in first]
    forget(tmp_path, 40, 60)
    assert train(1)[0][0] == "20"
    assert steps(tmp_path) == [20, 40, 60]


@pytest.mark.slow
def test_cpp_program_goes_on_from_its_last_checkpoint(tmp_path):
    # It removes its first checkpoint, and links libtorch.so first, as ${TORCH_LIBRARIES} does.
    program = code_block("cpp", "docs/checkpoints.md").replace("keep(3)", "keep(2)")
    library = Path(torch.__path__[0]) / "lib" / "libtorch.so"
    project = (
        "cmake_minimum_required(VERSION 3.18)\nproject(train CXX)\nfind_package(ampfuse REQUIRED)\n"
        "add_executable(train main.cpp)\n"
        f"target_link_libraries(train {library} ampfuse::ampfuse)\n"
    )
    build = built_program("checkpoints", {"main.cpp": program, "CMakeLists.txt": project})

    def train():
        return run(build / "train", cwd=tmp_path, env=environment()).split()

    first, last = train()
    assert first == "0"
    assert steps(tmp_path) == [40, 60]
    forget(tmp_path, 60)
    assert train() == ["40", last]
