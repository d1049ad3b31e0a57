"""A character-level transformer learns this file by heart.

python char_language_model.py
python -m ampfuse char_language_model.py
"""

import argparse
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, characters: int, width: int = 64, context: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, characters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(text) + self.position[: text.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1], text.device)
        return self.head(self.layers(hidden, mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="float16")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", help="where the trained weights go")
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, options.dtype)
    text = Path(__file__).read_text()
    characters = sorted(set(text))
    codes = torch.tensor([characters.index(c) for c in text], device=device)

    model = Model(len(characters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
    for step in range(options.steps):
        first = torch.randint(len(codes) - 65, (16, 1), device=device)
        batch = codes[first + torch.arange(65, device=device)]
        with torch.autocast(device, dtype):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 9:
            print(f"step {step} loss {loss.item():.4f} norm {norm.item():.3f}")

    if options.save:
        torch.save(model.state_dict(), options.save)


if __name__ == "__main__":
    main()
