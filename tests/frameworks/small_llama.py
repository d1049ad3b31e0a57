"""A small Llama, and random texts for it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CLASSES = 64


def llama(dtype=torch.float32):
    """Return a new model, with the same weights in each call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=CLASSES,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config).to(dtype)


def texts(number, length):
    """Return random texts as samples of a Trainer's dataset."""
    samples = torch.randint(CLASSES, (number, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": sample, "labels": sample} for sample in samples]
