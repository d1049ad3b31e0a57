"""Models that `apply_to_model` refuses, and the sentences that say why."""

import copy

import pytest
import torch
from ampfuse.integrations._deferred_logits import DeferredLogits
from ampfuse.integrations.causal_lm import apply_to_model
from causal_models import SIZES, batch, bfloat16_accelerator, model_of, pair_of
from peft import LoraConfig, get_peft_model
from torch.nn.utils import parametrizations
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForCausalLM
from transformers import AutoModelForSeq2SeqLM as EncoderDecoder
from transformers import AutoModelForSequenceClassification as Classifier


def config_of(name, **options):
    return AutoConfig.for_model(name, **SIZES | options)


class Quantised(torch.nn.Linear):
    def forward(self, input):
        return torch.nn.functional.linear(input, self.weight.round())


class WithoutLabels(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def with_own_loss():
    model = model_of()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    return model


def with_head(change):
    """Return a model with the output layer that a function returns for its own one."""
    model = model_of()
    model.lm_head = change(model.lm_head)
    return model


def quantised(_):
    return Quantised(16, 97, bias=False)


def with_other_forward(head):
    head.forward = torch.nn.functional.relu
    return head


LLAMA, BERT = config_of("llama"), config_of("bert")
T5 = AutoConfig.for_model("t5", vocab_size=97, d_model=16)
ON_THE_HEAD = LoraConfig(target_modules=["lm_head"])
REFUSED = [
    (lambda: torch.nn.Linear(2, 2), "expected a decoder of Transformers.* Linear"),
    (lambda: torch.compile(model_of()), "OptimizedModule .*; call apply_to_model before"),
    (lambda: bfloat16_accelerator().prepare(model_of()), "this LlamaForCausalLM was replaced"),
    (lambda: Classifier.from_config(LLAMA), "got LlamaForSequenceClassification with"),
    (lambda: model_of().model, "got LlamaModel with"),
    (lambda: EncoderDecoder.from_config(T5), "got T5ForConditionalGeneration with"),
    (lambda: WithoutLabels(LLAMA), "labels .* got WithoutLabels with"),
    (
        lambda: AutoModelForMaskedLM.from_config(BERT),
        "got .*with the loss .*ForMaskedLMLoss",
    ),
    (with_own_loss, "ForCausalLMLoss, got .*with the loss .*lambda"),
    (lambda: get_peft_model(model_of(), ON_THE_HEAD), "plain nn.Linear, got .*lora"),
    (lambda: with_head(quantised), "plain nn.Linear, got .*Quantised"),
    (lambda: with_head(parametrizations.weight_norm), "plain nn.Linear, got .*Parametrized"),
    (lambda: with_head(with_other_forward), "forward of the output layer was replaced"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED)
def test_model_is_refused_and_not_changed(model, message):
    model = model()
    before = type(model), vars(model).copy()
    with pytest.raises(TypeError, match=message):
        apply_to_model(model)
    assert (type(model), vars(model)) == before


def test_scaler_of_another_type_is_refused():
    with pytest.raises(TypeError, match="scaler: expected a GradScaler or None, got int"):
        apply_to_model(model_of(), scaler=3)


def with_sharded_weight():
    model = apply_to_model(model_of())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach()[:50])
    return model


def with_unshifted_loss():
    config = config_of("bart", d_model=16, decoder_layers=2, decoder_attention_heads=2)
    return apply_to_model(AutoModelForCausalLM.from_config(config).train())


class WithOwnLoss(LlamaForCausalLM):
    """A model whose loss is a function of itself, its hidden states and labels."""

    def __init__(self, config, loss_of):
        super().__init__(config)
        self.loss_of = loss_of

    def forward(self, input_ids=None, labels=None, **kwargs):
        return self.loss_of(self, self.model(input_ids).last_hidden_state, labels)


def old_loss(model, hidden, labels):
    """Compute the loss that modeling files had before Transformers' loss functions."""
    logits = model.lm_head(hidden)[..., :-1, :]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[..., 1:].flatten())


def z_loss(model, hidden, labels):
    logits = model.lm_head(hidden)
    return model.loss_function(logits, labels, 97) + logits.logsumexp(-1).square().mean()


def loss_of_own_product(model, hidden, labels):
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
    return {"loss": model.loss_function(logits, labels, 97), "logits": logits}


def loss_after(change):
    """Return a loss of logits that are changed before."""

    def loss_of(model, hidden, labels):
        return model.loss_function(change(model.lm_head(hidden)), labels, 97)

    return loss_of


def made(loss_of):
    return lambda: apply_to_model(WithOwnLoss(LLAMA, loss_of).train())


REFUSED_IN_STEP = [
    (lambda: get_peft_model(apply_to_model(model_of()), ON_THE_HEAD), "nn.Linear, got .*lora"),
    (with_sharded_weight, "expected a weight with 97 rows, got 50.*tensor parallelism"),
    (with_unshifted_loss, "this model reads .device"),
    (made(old_loss), "this model indexes them"),
    (made(z_loss), "this model reads .logsumexp"),
    (made(loss_of_own_product), "does not call its output layer"),
    (made(loss_after(lambda x: torch.log_softmax(x, -1))), "this model calls log_softmax"),
    (made(loss_after(lambda x: x * torch.ones(()))), "by something else than a number"),
    (made(loss_after(lambda x: torch.tanh(torch.tanh(x)))), "this model applies tanh twice"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED_IN_STEP)
def test_first_training_step_is_refused(model, message):
    model = model()
    with pytest.raises((TypeError, AttributeError, ValueError), match=message):
        model(**batch())


def test_loss_function_that_was_set_later_gets_the_logits():
    model = apply_to_model(model_of())
    model.loss_function = with_own_loss().loss_function
    model(**batch()).loss.backward()


def test_other_objects_of_the_class_of_a_changed_model_train_as_before():
    model = apply_to_model(model_of())
    other = type(model)(model.config).train()
    other.load_state_dict(model.state_dict())
    found = other(**batch())
    assert found.logits is not None
    torch.testing.assert_close(found.loss, model.train()(**batch()).loss)
    assert type(apply_to_model(other)) is type(model)
    assert other(**batch()).logits is None


def test_scaler_is_replaced_after_the_model_was_prepared():
    model = apply_to_model(model_of())
    prepared = bfloat16_accelerator().prepare(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert apply_to_model(prepared, scaler=scaler).loss_function.scaler is scaler


@pytest.mark.parametrize("divisor", [0, "a"])
def test_logits_are_divided_by_numbers_only(divisor):
    logits = DeferredLogits(torch.ones(1, 4), torch.nn.Linear(4, 3))
    with pytest.raises(TypeError, match="divides them by something else than a number other than"):
        logits / divisor


def test_refused_step_leaves_logits_to_other_calls():
    model = made(old_loss)()
    reference = copy.deepcopy(model)
    with pytest.raises(TypeError):
        model(**batch())
    assert torch.equal(model.eval()(**batch()), reference.eval()(**batch()))


def test_replaced_output_layer_is_checked_at_the_next_step():
    model = pair_of()[1]
    model.lm_head = quantised(model.lm_head)
    with pytest.raises(TypeError, match=r"plain nn.Linear, got .*Quantised"):
        model(**batch())
