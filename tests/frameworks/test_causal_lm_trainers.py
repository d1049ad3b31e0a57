"""`apply_to_model` in the trainers of Transformers and TRL: the same losses and parameters."""

import copy

import pytest
import torch
from ampfuse.integrations.causal_lm import apply_to_model
from causal_models import CLASSES, model_of
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerFast, Trainer
from transformers import TrainingArguments as Arguments
from trl import SFTConfig, SFTTrainer

OPTIONS = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def tokenizer():
    words = {f"w{index}": index for index in range(CLASSES)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "w0")), pad_token="w0", eos_token="w1"
    )


def dataset():
    """Return texts of different lengths, so that parts of a batch have different counts."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 14, (12,), generator=generator).tolist()
    tokens = [torch.randint(2, CLASSES, (n,), generator=generator).tolist() for n in lengths]
    return Dataset.from_list([{"input_ids": text, "labels": text} for text in tokens])


class CountingLogits:
    """A hook that counts a model's outputs that have logits."""

    def __init__(self, model):
        self.outputs = self.with_logits = 0
        model.register_forward_hook(self)

    def __call__(self, model, args, output):
        self.outputs += 1
        self.with_logits += getattr(output, "logits", None) is not None


def trained(model, make):
    """Return the logged losses, and the counts of outputs during the training."""
    counts = CountingLogits(model)
    trainer = make(model)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3
    return losses, counts


def assert_same_training(make):
    """Train a model with and without ampfuse. Return the counts of outputs of both."""
    theirs = model_of()
    ours = apply_to_model(copy.deepcopy(theirs))
    expected, their_counts = trained(theirs, make)
    losses, counts = trained(ours, make)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[2] < losses[0]
    for p, q in zip(theirs.parameters(), ours.parameters(), strict=True):
        # Adam moves a parameter whose gradient is almost 0 by rounding errors.
        assert (q - p).norm() <= 1e-3 * p.norm()
    return their_counts, counts


def of_transformers(model, folder):
    collator = DataCollatorForTokenClassification(tokenizer())
    return Trainer(model, Arguments(folder, **OPTIONS), collator, dataset())


def of_trl(model, folder, cls=SFTTrainer):
    arguments = SFTConfig(folder, **OPTIONS)
    return cls(model, arguments, train_dataset=dataset(), processing_class=tokenizer())


class LossOfTheModel(SFTTrainer):
    compute_loss = Trainer.compute_loss


def of_trl_with_the_loss_of_the_model(model, folder):
    return of_trl(model, folder, LossOfTheModel)


@pytest.mark.parametrize("make", [of_transformers, of_trl_with_the_loss_of_the_model])
def test_trainer_with_gradient_accumulation_needs_no_logits(make, tmp_path):
    their_counts, counts = assert_same_training(lambda model: make(model, str(tmp_path)))
    assert their_counts.with_logits == their_counts.outputs == counts.outputs == 6
    assert counts.with_logits == 0


def test_sft_trainer_keeps_its_own_fused_output_layer(tmp_path):
    their_counts, counts = assert_same_training(lambda model: of_trl(model, str(tmp_path)))
    assert their_counts.with_logits == counts.with_logits == 0


def test_trainer_evaluates_with_logits(tmp_path):
    trainer = of_transformers(apply_to_model(model_of()), str(tmp_path))
    result = trainer.predict(dataset().select(range(2)))
    assert result.predictions[0].shape[-1] == CLASSES
