"""Installs nvcc of a CUDA version (13.0) from Python packages into this interpreter's environment.

It goes where torch's own packages put the CUDA libraries: site-packages/nvidia/cu13.
"""

import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

# The parts of a toolkit that compile kernels. torch's own packages contain only the libraries.
PACKAGES = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl"]
# nvcc looks for the headers of this package beside itself. They are installed with torch, but torch
# may be in another environment on this one's path.
RUNTIME = "nvidia-cuda-runtime"


def installer() -> list[str]:
    """Return the command that installs packages here: pip, or uv if the environment has no pip."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--ignore-installed"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    sys.exit("fetching nvcc needs pip or uv in this environment")


def main() -> None:
    """Install nvcc of the version given as argument, or exit with a message."""
    cuda = sys.argv[1]
    major = cuda.split(".")[0]
    if int(major) < 13:
        sys.exit(f"nvcc of CUDA {cuda} is in no Python package: install the toolkit of CUDA {cuda}")
    headers = Path(sysconfig.get_path("purelib"), "nvidia", f"cu{major}", "include")
    packages = PACKAGES if (headers / "cuda_runtime.h").exists() else [*PACKAGES, RUNTIME]
    print(f"ampfuse: fetching nvcc {cuda} from Python packages (100 MB)", flush=True)
    wanted = [f"{package}=={cuda}.*" for package in packages]
    command = [*installer(), "--quiet", "--no-deps", *wanted]
    sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
