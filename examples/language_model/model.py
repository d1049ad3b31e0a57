"""A small transformer that predicts the next word."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 50_257  # the size of GPT-2's vocabulary
LENGTH = 64  # words in a passage


class LanguageModel(nn.Module):
    """Computes hidden states, which the last layer multiplies by the embedding's weight.

    `width` is a multiple of 32. With `recompute`, backward computes the activations of each layer
    again, to use less memory.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        recompute: bool,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width))
        for weight in (self.embedding.weight, self.position):
            nn.init.normal_(weight, std=width**-0.5)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                *(width, width // 32, 4 * width),
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, words: Tensor) -> Tensor:
        """Return hidden states [sequences, length, width]."""
        hidden: Tensor = self.embedding(words) + self.position
        for layer in self.layers:
            if self.recompute:
                hidden = checkpoint(layer, hidden, self.mask, is_causal=True, use_reentrant=False)
            else:
                hidden = layer(hidden, self.mask, is_causal=True)
        normed: Tensor = self.norm(hidden)
        return normed
