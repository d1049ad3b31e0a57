"""Made images for the classifiers beside this file, and how their accuracies are compared."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from comparison import COLORS, Figures
from torch import Tensor, nn

CLASSES = 10


@dataclass(frozen=True)
class Classified(Figures):
    """The measurements of one run, and its accuracy on the test images with each seed."""

    accuracies: list[float]


def made_images(
    count: int, seed: int, *, noise: float, shift: int, size: int = 32
) -> tuple[Tensor, Tensor]:
    """Return images [count, 3, size, size] of ten patterns, and their classes.

    The patterns are the same for every seed, and have a standard deviation of 1. Each image is
    shifted by up to `shift` pixels, around the edge, and has noise of this standard deviation.
    """
    of_patterns = torch.Generator().manual_seed(0)
    coarse = torch.randn(CLASSES, 3, 8, 8, generator=of_patterns)
    patterns = nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    patterns /= patterns.std((1, 2, 3), keepdim=True)
    generator = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=generator)
    shifts = torch.randint(-shift, shift + 1, (count, 2), generator=generator).tolist()
    images = torch.stack(
        [patterns[one].roll(by, (1, 2)) for one, by in zip(classes, shifts, strict=True)]
    )
    return images + noise * torch.randn(images.shape, generator=generator), classes


def accuracies(results: Mapping[str, Classified]) -> dict[str, list[str]]:
    """Return a column of a table, with the accuracies of all seeds."""
    cells = [
        " ".join(f"{100 * part:.0f}" for part in sorted(one.accuracies)) for one in results.values()
    ]
    return {"accuracy by seed, %": cells}


def agreement(results: Mapping[str, Classified]) -> str:
    """Compare the differences of accuracy between precisions with those between seeds."""
    means = [fmean(one.accuracies) for one in results.values()]
    apart = max(means) - min(means)
    spread = max(max(one.accuracies) - min(one.accuracies) for one in results.values())
    equally = "equally" if apart <= spread else "not equally"
    return (
        f"The precisions are {equally} accurate: their means differ by {100 * apart:.1f} points, "
        f"and two seeds of one precision by up to {100 * spread:.1f}."
    )


def dots(axes: Any, results: Mapping[str, Classified]) -> None:
    """Draw the accuracy of each seed."""
    for name, one in results.items():
        axes.scatter(
            one.accuracies, [name] * len(one.accuracies), color=COLORS[name], s=60, alpha=0.7
        )
    axes.set_title("accuracy with each seed")
    axes.margins(y=0.3)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
