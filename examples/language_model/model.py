"""A small transformer that guesses the next word."""

import torch
from torch import Tensor, nn

VOCABULARY = 50_257  # GPT-2's
WIDTH = 128
LENGTH = 64  # of a passage, in words


class LanguageModel(nn.Module):
    """From words to what the last layer multiplies with the embedding's weight."""

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
        """Hidden states [sequences, LENGTH, WIDTH]."""
        embedded = self.embedding(words) + self.position
        hidden: Tensor = self.layers(embedded, mask=self.mask, is_causal=True)
        return hidden
