"""A small transformer that predicts the next word."""

import torch
from torch import Tensor, nn

VOCABULARY = 50_257  # the size of GPT-2's vocabulary
WIDTH = 128
LENGTH = 64  # words in a passage


class LanguageModel(nn.Module):
    """Computes hidden states, which the last layer multiplies by the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.empty(LENGTH, WIDTH))
        for weight in (self.embedding.weight, self.position):
            nn.init.normal_(weight, std=WIDTH**-0.5)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, words: Tensor) -> Tensor:
        """Return hidden states [sequences, LENGTH, WIDTH]."""
        embedded = self.embedding(words) + self.position
        hidden: Tensor = self.layers(embedded, mask=self.mask, is_causal=True)
        return hidden
