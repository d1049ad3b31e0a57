"""Text that ships with Python: the source of its standard library, word by word."""

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SKIPPED = {"site-packages", "dist-packages", "test", "tests"}  # folders


def words(vocabulary: int) -> Tensor:
    """Each word as its rank among the frequent ones, from 1 on; 0 for rarer words."""
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
    """Random passages and, for each word of them, the word that follows; the same in every run."""
    generator = torch.Generator().manual_seed(0)
    passages = text.unfold(0, length + 1, 1)
    for _ in range(steps):
        chosen = passages[torch.randint(len(passages), (sequences,), generator=generator)]
        yield chosen[:, :-1], chosen[:, 1:]
