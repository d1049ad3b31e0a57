"""A description of this installation and of what works here, for users and bug reports."""

import os
import platform
from collections.abc import Iterator

import torch

import ampfuse
from ampfuse import _library


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
    on_cuda = _cuda_verdict()
    rows += [("works on CPU", _verdict("cpu")), ("works on CUDA", on_cuda)]
    gpus = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    works = not on_cuda.startswith("no")
    kernels = info["cuda_version"]
    texts = advice(torch.version.cuda, kernels, _library.driver_version(), gpus, works=works)
    return rows + [("advice", text) for text in texts]


def advice(
    torchs_cuda: str | None,
    kernels: str,
    driver: int,
    gpus: list[tuple[int, int]],
    *,
    works: bool,
) -> Iterator[str]:
    """Yield sentences, each with one thing to change.

    kernels: The CUDA version of the kernels, empty without kernels.
    driver: The newest CUDA version that it supports, 13000 for 13.0, or 0 without a driver.
    gpus: The compute capabilities of the GPUs that torch sees.
    works: Whether the kernels run on the first one.
    """
    if torchs_cuda is None:
        if driver:
            yield (
                "this torch is a CPU build, but there is an NVIDIA driver: install torch with "
                f"CUDA (https://pytorch.org){'' if kernels else ', and then ampfuse again'}"
            )
    elif not gpus:
        supported = f"supports CUDA {_library.name_of_cuda(driver)}"
        yield (
            f"torch sees no GPU: the NVIDIA driver {supported if driver else 'was not found'}, "
            f"torch needs CUDA {torchs_cuda.partition('.')[0]}, and CUDA_VISIBLE_DEVICES is "
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}"
        )
    elif kernels and (text := _library.advise_on_driver(driver, kernels)):
        yield text
    elif not works:
        archs = " ".join(sorted({f"{major}.{minor}" for major, minor in gpus}))
        yield (
            f'compile kernels for {archs}: in the checkout, TORCH_CUDA_ARCH_LIST="{archs}" pip '
            "install --no-build-isolation --force-reinstall --no-deps ."
        )


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
        ampfuse.ops.fused_sgd([stepped.detach()], [stepped.grad], lr=torch.tensor(0.25))
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
    right = right and stepped.tolist() == [0.5, 0.5] and scaler.get_scale() == 8.0
    right = right and grad.tolist() == [[-0.5, 0.5]] and of_hidden.tolist() == [[1.0]]
    names = "norm, unscale, unscale_norm, clip, fused_adam, fused_sgd, update_scale, "
    names += "cross_entropy, linear_cross_entropy"
    return names if right else "no: the results are wrong"


def _cuda_verdict() -> str:
    if not torch.cuda.is_available():
        return "no: no GPU is visible to torch"
    if not ampfuse.has_cuda():
        return "no: this is a CPU build of ampfuse"
    return _verdict("cuda")
