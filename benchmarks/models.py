"""The models that whole training steps are measured with: GPT-2 and ViT, of any size."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """The size of a transformer, and of one batch."""

    width: int
    depth: int
    heads: int
    classes: int  # words of a vocabulary, or kinds of images
    length: int  # words of a sequence, or pixels along the edge of an image
    batch: int


class Block(nn.Module):
    """A transformer block: attention and an MLP, each with layer norm and residual connection."""

    def __init__(self, size: Size, is_causal: bool) -> None:
        super().__init__()
        width = size.width
        self.heads, self.is_causal = size.heads, is_causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attend = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden states."""
        first_norm, second_norm = self.norms
        split = self.attend(first_norm(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        hidden = hidden + self.join(found.transpose(1, 2).flatten(2))
        wide = functional.gelu(self.widen(second_norm(hidden)), approximate="tanh")
        result: Tensor = hidden + self.narrow(wide)
        return result


class GPT2(nn.Module):
    """Hidden states of sequences of words. The last layer's weight is that of the embedding."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.classes, size.width)
        self.position = nn.Parameter(torch.empty(size.length, size.width))
        self.blocks = nn.Sequential(*(Block(size, is_causal=True) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        for weight in (self.embedding.weight, self.position):
            nn.init.normal_(weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """Return hidden states, one row per word."""
        hidden: Tensor = self.norm(self.blocks(self.embedding(words) + self.position))
        return hidden.flatten(0, 1)

    @property
    def weight(self) -> Tensor:
        """The weight of the last layer."""
        return self.embedding.weight


class ViT(nn.Module):
    """Hidden states of images, from patches of 16 × 16 pixels."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        patches = (size.length // 16) ** 2
        self.embedding = nn.Conv2d(3, size.width, 16, stride=16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.position = nn.Parameter(torch.empty(patches + 1, size.width))
        self.blocks = nn.Sequential(*(Block(size, is_causal=False) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.weight = nn.Parameter(torch.empty(size.classes, size.width))
        for weight in (self.position, self.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Return hidden states, one row per image."""
        patches = self.embedding(images).flatten(2).transpose(1, 2)
        first = self.class_token.expand(len(images), -1, -1).to(patches.dtype)
        hidden = self.blocks(torch.cat([first, patches], dim=1) + self.position)
        rows: Tensor = self.norm(hidden[:, 0])
        return rows
