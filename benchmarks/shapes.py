"""Lists of parameter shapes: regular ones that isolate an effect, and those of three models.

The models' shapes are generated from the numbers of their architectures, in the order in which a
module would list its parameters.
"""

from collections.abc import Callable
from math import prod

Shape = tuple[int, ...]

M = 2**20
K = 2**10


def element_count(shapes: list[Shape]) -> int:
    return sum(prod(shape) for shape in shapes)


def gpt2_124m() -> list[Shape]:
    """GPT-2 small: learned positions, biases everywhere, output tied to the token embedding."""
    vocabulary, positions, width, layers = 50257, 1024, 768, 12
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    feed_forward: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    layer = [*norm, *attention, *norm, *feed_forward]
    return [(vocabulary, width), (positions, width), *layer * layers, *norm]


def resnet50() -> list[Shape]:
    """ResNet-50 for 1000 classes: bottleneck blocks, each convolution with its batch norm."""
    stem, classes, expansion = 64, 1000, 4
    widths, depths = (64, 128, 256, 512), (3, 4, 6, 3)

    def convolution(outputs: int, inputs: int, kernel: int) -> list[Shape]:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]

    shapes = convolution(stem, 3, 7)
    inputs = stem
    for width, depth in zip(widths, depths, strict=True):
        outputs = expansion * width
        for block in range(depth):
            shapes += convolution(width, inputs, 1)
            shapes += convolution(width, width, 3)
            shapes += convolution(outputs, width, 1)
            if block == 0:  # the shortcut changes width, so it has a convolution of its own
                shapes += convolution(outputs, inputs, 1)
            inputs = outputs
    return [*shapes, (classes, inputs), (classes,)]


def llama_1b() -> list[Shape]:
    """A Llama of about 1.2 billion parameters: grouped queries, gated feed-forward, tied output."""
    vocabulary, width, feed_forward, layers = 128256, 2048, 8192, 16
    key_value = 8 * 64  # heads times head width
    attention: list[Shape] = [(width, width), *[(key_value, width)] * 2, (width, width)]
    gated: list[Shape] = [(feed_forward, width), (feed_forward, width), (width, feed_forward)]
    norms: list[Shape] = [(width,), (width,)]
    return [(vocabulary, width), *[*attention, *gated, *norms] * layers, (width,)]


# The first three have the same 64 Mi elements, so that only the number of tensors differs between
# them. The last one measures launches and bookkeeping, since it has few bytes.
REGULAR: dict[str, Callable[[], list[Shape]]] = {
    "1x64M": lambda: [(64 * M,)],
    "64x1M": lambda: [(M,)] * 64,
    "1024x64K": lambda: [(64 * K,)] * 1024,
    "10000x64": lambda: [(64,)] * 10_000,
}

MODELS: dict[str, Callable[[], list[Shape]]] = {
    "gpt2-124m": gpt2_124m,
    "resnet50": resnet50,
    "llama-1b": llama_1b,
}
