"""A description of this installation and of what works here, for users and bug reports."""

import contextlib
import ctypes
import os
import platform
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

import ampfuse

FIRST_DRIVER = 12010  # of CUDA 12.1: older ones refuse the kernels' 32,764 argument bytes


def describe() -> list[tuple[str, str]]:
    """Return the rows of a table, each a name and a description."""
    info = ampfuse.build_info()
    rows = [
        ("ampfuse", f"{info['version']} ({info['build_type']}, {info['compiler']})"),
        ("built for torch", info["torch_version"]),
        ("torch", torch.__version__),
        ("Python", platform.python_version()),
        ("CPU kernels", f"{info['cpu_capability']}, {torch.get_num_threads()} threads"),
        ("CUDA kernels", _cuda_build(info)),
    ]
    rows += [(f"GPU {index}", text) for index, text in enumerate(_gpus())]
    rows += [("works on CPU", _verdict("cpu")), ("works on CUDA", _cuda_verdict())]
    gpus = range(torch.cuda.device_count())
    found = Installation(
        cuda_archs=info["cuda_archs"],
        built_with=info["cuda_version"],
        torchs_cuda=torch.version.cuda,
        driver=driver_version(),
        gpus=[torch.cuda.get_device_capability(index) for index in gpus],
    )
    return rows + [("advice", text) for text in advice(found)]


class Installation(NamedTuple):
    """The facts that decide whether CUDA kernels run."""

    cuda_archs: str
    """The architectures of the kernels in CMake's notation, for example "80-real 90"."""
    built_with: str
    """The CUDA version that compiled them; empty in a CPU build."""
    torchs_cuda: str | None
    driver: int
    """The newest CUDA version that the driver supports: 13000 for 13.0, 0 without a driver."""
    gpus: list[tuple[int, int]]
    """The compute capabilities of the GPUs that torch sees."""


def advice(found: Installation) -> Iterator[str]:
    """Yield sentences, each with one thing to change."""
    if found.torchs_cuda is None:
        if found.driver:
            yield (
                "this torch is a CPU build, but there is an NVIDIA driver: install torch with "
                "CUDA (https://pytorch.org), and then ampfuse again"
            )
        return
    torchs_major = found.torchs_cuda.partition(".")[0]
    if not found.gpus:
        supported = f"supports CUDA {found.driver // 1000}.{found.driver % 1000 // 10}"
        yield (
            "torch sees no GPU: the NVIDIA driver "
            f"{supported if found.driver else 'was not found'}, torch needs CUDA {torchs_major}, "
            f"and CUDA_VISIBLE_DEVICES is {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        )
        return
    if found.driver < FIRST_DRIVER:
        yield "update the NVIDIA driver to 530 or newer: launches of kernels will fail"
    missing = [gpu for gpu in found.gpus if not _is_served(gpu, found.cuda_archs)]
    if found.built_with and found.built_with.partition(".")[0] != torchs_major:
        missing = found.gpus
    if missing:
        archs = " ".join(sorted({f"{major}.{minor}" for major, minor in missing}))
        yield (
            f'compile kernels for {archs}: in the checkout, TORCH_CUDA_ARCH_LIST="{archs}" pip '
            "install --no-build-isolation --force-reinstall --no-deps ."
        )


def _is_served(gpu: tuple[int, int], cuda_archs: str) -> bool:
    """Return True if kernels for one of these architectures run on a GPU.

    Machine code runs on the later GPUs of its major version, and PTX on all later ones. That of an
    architecture with a letter, as in "90a", counts for one GPU only.
    """
    for arch in cuda_archs.split():
        match = re.fullmatch(r"(\d+)(\d)([a-z]?)(-real)?(?:-virtual)?", arch)
        if match is None:
            continue
        built = int(match[1]), int(match[2])
        if built == gpu or (built < gpu and not match[3] and (built[0] == gpu[0] or not match[4])):
            return True
    return False


def driver_version() -> int:
    """Return the newest CUDA version that the driver supports: 13000 for 13.0, 0 without driver."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value


def _cuda_build(info: dict[str, str]) -> str:
    if not ampfuse.has_cuda():
        return "none: this is a CPU build"
    # CMake's notation: 80-real means machine code, 90 means machine code and PTX.
    archs = [
        f"sm_{arch.removesuffix('-real')}" + ("" if arch.endswith("-real") else " with PTX")
        for arch in info["cuda_archs"].split()
    ]
    return f"CUDA {info['cuda_version']} for {', '.join(archs)}"


def _gpus() -> list[str]:
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB"
        )
    return gpus


def _verdict(device: str) -> str:
    """Run the ops on a device; return their names if the results are right, or else the error."""
    grads = [torch.tensor([3.0, 4.0], device=device)]
    try:
        flag, scale = torch.zeros((), device=device), torch.full((), 0.5, device=device)
        norm = ampfuse.ops.multi_tensor_norm(grads).total_norm
        ampfuse.ops.multi_tensor_unscale(grads, flag, scale)
        halved = ampfuse.ops.multi_tensor_unscale_norm(grads, flag, scale).total_norm
        ampfuse.ops.multi_tensor_clip(grads, halved, 1.0)
        stepped = torch.nn.Parameter(torch.ones(2, device=device, dtype=torch.bfloat16))
        stepped.grad = torch.ones_like(stepped)
        ampfuse.AdamW([stepped], lr=0.25, weight_decay=0.0).step()
        scaler = ampfuse.GradScaler(device, 4.0, growth_interval=1)
        scaler.scale(flag)
        scaler.unscale_(torch.optim.SGD([stepped], lr=1.0))
        scaler.update()
        logits = torch.zeros(1, 2, device=device, requires_grad=True)
        loss = ampfuse.cross_entropy(logits, torch.tensor([0], device=device))
        (grad,) = torch.autograd.grad(loss, logits)
        hidden = torch.zeros(1, 1, device=device, requires_grad=True)
        weight = torch.tensor([[0.0], [2.0]], device=device)
        loss = ampfuse.linear_cross_entropy(hidden, weight, torch.tensor([0], device=device))
        (of_hidden,) = torch.autograd.grad(loss, hidden)
    except RuntimeError as error:
        return f"no: {str(error).splitlines()[0]}"
    right = norm.item() == 5.0 and halved.item() == 1.25 and abs(grads[0].norm().item() - 1) < 1e-5
    right = right and stepped.tolist() == [0.75, 0.75] and scaler.get_scale() == 8.0
    right = right and grad.tolist() == [[-0.5, 0.5]] and of_hidden.tolist() == [[1.0]]
    names = "norm, unscale, unscale_norm, clip, fused_adam, update_scale, cross_entropy, "
    names += "linear_cross_entropy"
    return names if right else "no: the results are wrong"


def _cuda_verdict() -> str:
    if not torch.cuda.is_available():
        return "no: no GPU is visible to torch"
    if not ampfuse.has_cuda():
        return "no: this is a CPU build of ampfuse"
    return _verdict("cuda")
