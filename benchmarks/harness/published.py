"""The tables that the pages show: which rows of which results, and how they are called there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

H100 = "nvidia-h100-80gb-hbm3"
H200 = "nvidia-h200"
EPYC = "amd-epyc"


@dataclass(frozen=True)
class Column:
    """A column of numbers: the least value that any of these providers has in a field."""

    head: str
    providers: Sequence[str]
    field: str = "median_ms"


@dataclass(frozen=True)
class Line:
    """A line of a table: a case of a file of results, after its labels."""

    labels: Sequence[str]
    file: str
    operation: str
    shape: str
    dtype: str


@dataclass(frozen=True)
class Table:
    """A table; with `has_ratio`, its last column compares the first provider with the last."""

    heads: Sequence[str]
    columns: Sequence[Column]
    lines: Sequence[Line]
    has_ratio: bool = False


TORCH = Column("torch", ("torch", "torch foreach"))
FUSED = Column("torch, fused", ("torch fused", "torch fused=True"))
FLOAT = Column("torch, `.float()`", ("torch .float()",))
COMPILED = Column("torch.compile", ("torch.compile",))
LIGER = Column("Liger", ("Liger",))
OURS = Column("ampfuse", ("ampfuse",))
BOTH = Column("ampfuse, torch.compile", ("ampfuse, torch.compile",))
RATE = Column("of the memory's rate", ("ampfuse",), "of_ceiling")


def with_memory(columns: Sequence[Column]) -> list[Column]:
    """Return each column of times and, after it, the same provider's memory in MiB."""
    return [
        each
        for time in columns
        for each in (time, Column(f"{time.head}, MiB", time.providers, "peak_mib"))
    ]


MULTI_TENSOR = {
    "total norm": "total_norm",
    "clip, scaling needed": "clip",
    "clip, norm within the limit": "clip_below_limit",
    "unscale": "unscale",
    "unscale, norm and clip": "unscale_norm_clip",
}
SCALER = {
    "no clipping": "step",
    "clipping, scaling needed": "step_clip",
    "clipping, norm within the limit": "step_clip_below_limit",
    "optimizer steps on the device": "step_on_device",
}
STEPS = {
    "float32": ("step", "float32"),
    "bfloat16, float32 masters": ("step", "bfloat16"),
    "bfloat16, remainders": ("step_remainder", "bfloat16"),
    "bfloat16, remainders, bfloat16 moments": ("step_smallest", "bfloat16"),
    "bfloat16, remainders, 8-bit moments": ("step_8bit", "bfloat16"),
    "bfloat16, stochastic, 8-bit moments": ("step_stochastic", "bfloat16"),
    "float32, the update alone": ("update", "float32"),
}


def multi_tensor(machine: str, more: Sequence[Column]) -> Table:
    """Return the table of functions over lists of gradients."""
    lines = [
        Line([label], f"{machine}/multi_tensor.csv", operation, "64x1M", "float32")
        for label, operation in MULTI_TENSOR.items()
    ]
    return Table(["64 × 1M float32 elements"], [TORCH, COMPILED, OURS, *more], lines)


def scaler(machine: str, shapes: Sequence[str]) -> Table:
    """Return the table of what loss scaling costs."""
    lines = [
        Line([label, shape], f"{machine}/grad_scaler.csv", operation, shape, "float32")
        for shape in shapes
        for label, operation in SCALER.items()
    ]
    return Table(["", "gradients"], [TORCH, OURS], lines)


def steps(machine: str, shapes: Sequence[str], kinds: Sequence[str]) -> Table:
    """Return the table of optimizer steps."""
    lines = [
        Line([label, shape], f"{machine}/fused_adam.csv", STEPS[label][0], shape, STEPS[label][1])
        for shape in shapes
        for label in kinds
    ]
    return Table(["", "parameters"], [FUSED, COMPILED, OURS], lines)


def losses(machine: str, cases: Sequence[tuple[str, str]], more: Sequence[Column]) -> Table:
    """Return the table of losses with gradients, by shape and dtype of the logits."""
    file = f"{machine}/cross_entropy.csv"
    lines = [
        Line([shape.replace("x", " × "), dtype], file, "train", shape, dtype)
        for shape, dtype in cases
    ]
    return Table(["logits", "dtype"], [TORCH, FLOAT, COMPILED, OURS, *more], lines)


def linear(machine: str, shapes: Sequence[str], columns: Sequence[Column]) -> Table:
    """Return the table of linear cross-entropies with gradients: time and memory."""
    file = f"{machine}/linear_cross_entropy.csv"
    lines = [
        Line([shape.replace("x", " × ")], file, "train", shape, "bfloat16") for shape in shapes
    ]
    return Table(["rows × features × classes"], with_memory(columns), lines)


def training(lines: Mapping[str, str]) -> Table:
    """Return the table of whole training steps of models, by label: time and memory."""
    file = f"{H200}/training.csv"
    rows = [Line([label], file, "step", shape, "bfloat16") for label, shape in lines.items()]
    return Table(["milliseconds"], with_memory([FUSED, COMPILED, OURS, BOTH]), rows)


BEST_OF_TORCH = Column("torch", ("torch fused=True", "torch fused", "torch", "torch foreach"))
FRONT = {
    "Training step of GPT-2 124M, bfloat16 autocast, 8 × 1024 words": (
        *("H200", f"{H200}/training.csv"),
        *("step", "gpt2-124m", "bfloat16"),
    ),
    "Training step of ViT-B/16, bfloat16 autocast, 64 images": (
        *("H200", f"{H200}/training.csv"),
        *("step", "vit-b-16", "bfloat16"),
    ),
    "AdamW step with unscaling and clipping, float32, 64 × 1M parameters": (
        *("H100", f"{H100}/fused_adam.csv"),
        *("step", "64x1M", "float32"),
    ),
    "Cross-entropy and its gradient, bfloat16, 8192 × 50257 logits": (
        *("H100", f"{H100}/cross_entropy.csv"),
        *("train", "8192x50257", "bfloat16"),
    ),
    "Loss scaling, norm below the limit, 1000 gradients of 64K elements": (
        *("H100", f"{H100}/grad_scaler.csv"),
        *("step_clip_below_limit", "1000x64K", "float32"),
    ),
    "AdamW step, bfloat16 with float32 masters, parameters of ResNet-50": (
        *("CPU", f"{EPYC}/fused_adam.csv"),
        *("step", "resnet50", "bfloat16"),
    ),
    "Linear cross-entropy and its gradients, bfloat16, 4096 rows, 50257 classes": (
        *("CPU", f"{EPYC}/linear_cross_entropy.csv"),
        *("train", "4096x512x50257", "bfloat16"),
    ),
    "Patched scaler, clipping and `AdamW(fused=True)`, gradients of ResNet-50": (
        *("CPU", f"{EPYC}/patched_step.csv"),
        *("patched_step", "resnet50", "float32"),
    ),
}
TRAINING = {
    "GPT-2 124M, 8 × 1024 words": "gpt2-124m",
    "ViT-B/16, 64 images": "vit-b-16",
}
TABLES = {
    "front": Table(
        ["milliseconds", "on"],
        [BEST_OF_TORCH, COMPILED, BOTH, OURS],
        [Line([label, machine], *case) for label, (machine, *case) in FRONT.items()],
        has_ratio=True,
    ),
    "training-h200": training(TRAINING),
    "multi-tensor-h100": multi_tensor(H100, [RATE]),
    "multi-tensor-cpu": multi_tensor(EPYC, []),
    "step-h100": steps(H100, ["64x1M"], ["float32"]),
    "step-cpu": steps(EPYC, ["64x1M", "resnet50"], list(STEPS)),
    "scaler-h100": scaler(H100, ["10x1K", "1000x1K", "1000x64K"]),
    "scaler-cpu": scaler(EPYC, ["10x1K", "1000x1K", "1000x64K"]),
    "patched-cpu": Table(
        ["gradients"],
        [TORCH, FUSED, OURS],
        [
            Line([shape], f"{EPYC}/patched_step.csv", "patched_step", shape, "float32")
            for shape in ("100x1K", "1000x1K", "resnet50")
        ],
    ),
    "busy-cpu": Table(
        ["gradients"],
        [TORCH, OURS],
        [
            Line([shape], f"{EPYC}/busy_cores.csv", "step_clip_2_threads", shape, "float32")
            for shape in ("10x1K", "100x1K", "1000x1K", "10000x1K")
        ],
    ),
    "loss-h100": losses(
        H100,
        [
            *(("8192x50257", "bfloat16"), ("8192x50257", "float32")),
            *(("8192x128256", "bfloat16"), ("4096x151936", "bfloat16")),
            *(("32768x65536", "bfloat16"), ("32768x32768", "bfloat16")),
            *(("32768x4096", "bfloat16"), ("32768x1024", "bfloat16")),
            *(("8192x1000", "bfloat16"), ("8192x100", "bfloat16")),
        ],
        [RATE],
    ),
    "loss-cpu": losses(
        EPYC,
        [
            (shape, dtype)
            for shape in (
                *("1024x32000", "512x50257", "128x262144", "1024x1000", "8192x100", "8192x10"),
                *("8x21x256x256", "4x150x128x128"),
            )
            for dtype in ("bfloat16", "float32")
        ],
        [],
    ),
    "linear-h100": linear(
        H100,
        ["4096x4096x128256", "1024x4096x128256", "1024x768x50257"],
        [TORCH, COMPILED, LIGER, OURS],
    ),
    "linear-cpu": linear(
        EPYC,
        [
            *("256x512x50257", "1024x512x50257", "4096x512x50257", "1024x96x50257"),
            *("1024x512x128256", "1024x288x256000"),
        ],
        [TORCH, COMPILED, OURS],
    ),
}
IN_CHINESE = {
    "milliseconds": "毫秒",
    "on": "设备",
    "ratio": "加速",
    **dict(
        zip(
            FRONT,
            (
                "GPT-2 124M 的一个训练步，bfloat16 autocast，8 × 1024 个词",
                "ViT-B/16 的一个训练步，bfloat16 autocast，64 张图像",
                "AdamW 一步，含反缩放和裁剪，float32，64 × 1M 个参数",
                "交叉熵及其梯度，bfloat16，8192 × 50257 个 logits",
                "损失缩放，范数未超过上限，1000 个梯度，每个 64K 个元素",
                "AdamW 一步，bfloat16 加 float32 主权重，ResNet-50 的参数",
                "线性交叉熵及其梯度，bfloat16，4096 行，50257 个类别",
                "无需修改代码：scaler、裁剪和 `AdamW(fused=True)`，ResNet-50 的梯度",
            ),
            strict=True,
        )
    ),
}
