"""Text that ships with Python: the source of its standard library, word by word."""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests"}  # folders to skip


def words(vocabulary: int) -> Tensor:
    """Return each word as its rank by frequency, from 1 on; rare words are 0."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(library.rglob("*.py"))
        if not SKIPPED & {*file.relative_to(library).parts}
    ]
    text = "\n".join(file.read_text(errors="ignore") for file in files)
    found = re.findall(r"\w+|[^\w\s]|\n", text)
    frequent = [word for word, _ in Counter(found).most_common(vocabulary - 1)]
    rank = {word: index for index, word in enumerate(frequent, start=1)}
    return torch.tensor([rank.get(word, 0) for word in found])


def batches(
    text: Tensor, steps: int, sequences: int, length: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random passages, and the next word for each of their words; equal in every run."""
    generator = torch.Generator().manual_seed(0)
    passages = text.unfold(0, length + 1, 1)
    for _ in range(steps):
        chosen = passages[torch.randint(len(passages), (sequences,), generator=generator)]
        yield chosen[:, :-1], chosen[:, 1:]
