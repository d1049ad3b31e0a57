"""A small causal transformer, and sentences that it can learn."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 64
WIDTH = 32
HEADS = 4
LENGTH = 32  # words in a sentence
SENTENCES = 16  # in the batch of one step, on all ranks together


class Block(nn.Module):
    """Attention and a perceptron. With tensor parallelism, each rank has some of the heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # There are no biases. A key's bias would have a gradient of 0 plus rounding errors, from
        # which Adam makes full steps, so that runs which round differently would part.
        self.attention_norm = nn.RMSNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)  # rows in the order of heads
        self.attention_out = nn.Linear(width, width, bias=False)
        self.perceptron_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape: [sentences, words, width]."""
        size = hidden.shape[-1] // HEADS
        heads = self.attention_in(self.attention_norm(hidden)).unflatten(-1, (-1, 3, size))
        query, key, value = heads.permute(3, 0, 2, 1, 4)  # each [sentences, heads, words, ...]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        up = functional.gelu(self.up(self.perceptron_norm(hidden)))
        result: Tensor = hidden + self.down(up)
        return result


class Transformer(nn.Module):
    """Computes the hidden states that the last layer turns into logits."""

    def __init__(self, blocks: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding: nn.Module = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleDict({str(index): Block(width) for index in range(blocks)})
        self.norm: nn.Module = nn.RMSNorm(width)

    def keep_stage(self, stage: int, stages: int) -> None:
        """Remove the layers of the other stages of a pipeline."""
        blocks = len(self.blocks)
        for index in range(blocks):
            if index * stages // blocks != stage:
                del self.blocks[str(index)]
        if stage != 0:
            self.embedding = nn.Identity()
        if stage != stages - 1:
            self.norm = nn.Identity()

    def forward(self, words: Tensor) -> Tensor:
        """Return hidden states of shape [sentences, words, width]."""
        hidden: Tensor = self.embedding(words)
        for block in self.blocks.values():
            hidden = block(hidden)
        normed: Tensor = self.norm(hidden)
        return normed


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return the words of a step's sentences, and the words that follow them.

    Each word has four successors of the same probability, so the least possible loss is log 4.
    """
    successors = torch.randint(
        VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(0)
    )
    generator = torch.Generator().manual_seed(1 + step)
    words = [torch.randint(VOCABULARY, (SENTENCES,), generator=generator)]
    for choice in torch.randint(4, (LENGTH, SENTENCES), generator=generator):
        words.append(successors[words[-1], choice])
    return torch.stack(words[:-1], dim=1), torch.stack(words[1:], dim=1)
