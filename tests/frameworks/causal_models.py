"""Tiny causal language models of Transformers, their batches, losses and gradients."""

import copy

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from ampfuse.integrations.causal_lm import apply_to_model
from transformers import AutoConfig, AutoModelForCausalLM

CLASSES = 97
SIZES = {
    "vocab_size": CLASSES,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "initializer_range": 0.4,  # logits have values up to 5: caps and scales of them matter
}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
# The architectures, and the options of theirs that concern the logits.
OPTIONS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "mistral": {},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "gemma3_text": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "gpt2": NO_DROPOUT,
    "phi": {"num_key_value_heads": 2},  # its output layer has a bias
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "modernbert-decoder": {"global_attn_every_n_layers": 1},
    "mamba": {"state_size": 4},
}


def model_of(name="llama", **options):
    """Return a model that trains, with random weights and biases."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES | OPTIONS[name] | options)
    model = AutoModelForCausalLM.from_config(config).train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def pair_of(name="llama", **options):
    """Return two equal models, of which ampfuse is applied to the second one."""
    model = model_of(name, **options)
    return model, apply_to_model(copy.deepcopy(model))


def bfloat16_accelerator():
    """Return an Accelerator whose options may differ from those of earlier ones."""
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(cpu=True, mixed_precision="bf16")


def batch(rows=2, length=11, seed=0):
    """Return tokens and labels, of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, CLASSES, (rows, length), generator=generator)
    labels = tokens.clone()
    labels[0, :4] = -100
    labels[:, 7] = -100
    return {"input_ids": tokens, "labels": labels}


def step(model, **changes):
    """Return a model's outputs, after the backward pass of its loss."""
    model.zero_grad()
    outputs = model(**batch() | changes)
    outputs.loss.backward()
    return outputs


def assert_same_step(expected, model, tolerance=1e-6, **changes):
    """Compare the losses of two models, and the gradients of all parameters."""
    losses = [step(one, **changes).loss for one in (expected, model)]
    torch.testing.assert_close(losses[1], losses[0], rtol=tolerance, atol=0.0)
    assert_same_gradients(expected, model, tolerance)


def assert_same_gradients(expected, model, tolerance=1e-6):
    """Compare the gradients of all parameters, relative to the norms of theirs and of all."""
    theirs = {name: p.grad for name, p in expected.named_parameters() if p.grad is not None}
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() != set()
    largest = max(grad.norm() for grad in theirs.values())
    assert largest > 0
    for name, grad in theirs.items():
        error = (ours[name].float() - grad.float()).norm()
        assert error <= tolerance * (2 * grad.norm() + 0.1 * largest), name
