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


def compiled():
    return torch.compile(model_of())


def prepared():
    return bfloat16_accelerator().prepare(model_of())


def classifier():
    return Classifier.from_config(config_of("llama"))


def base_model():
    return model_of().model


def encoder_decoder():
    return EncoderDecoder.from_config(AutoConfig.for_model("t5", vocab_size=97, d_model=16))


def masked_language_model():
    return AutoModelForMaskedLM.from_config(config_of("bert"))


class ForwardWithoutLabels(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def forward_without_labels():
    return ForwardWithoutLabels(config_of("llama"))


def own_loss():
    model = model_of()
    model.loss_function = lambda logits, labels, **kwargs: logits.sum()
    return model


def adapter_on_the_head():
    return get_peft_model(model_of(), LoraConfig(target_modules=["lm_head"]))


def quantised_head():
    model = model_of()
    model.lm_head = Quantised(16, 97, bias=False)
    return model


def normalised_head():
    model = model_of()
    parametrizations.weight_norm(model.lm_head)
    return model


def replaced_forward_of_the_head():
    model = model_of()
    model.lm_head.forward = torch.nn.functional.relu
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            lambda: torch.nn.Linear(2, 2),
            "expected a causal language model of Transformers.* Linear",
        ),
        (compiled, "OptimizedModule; call apply_to_model before"),
        (prepared, "forward of this LlamaForCausalLM was replaced"),
        (classifier, "got LlamaForSequenceClassification, which"),
        (base_model, "got LlamaModel, which"),
        (encoder_decoder, "got T5ForConditionalGeneration, which is an encoder-decoder"),
        (forward_without_labels, "got ForwardWithoutLabels, which .* no `labels` in its forward"),
        (masked_language_model, "ForCausalLMLoss, got .*ForMaskedLMLoss"),
        (own_loss, "ForCausalLMLoss, got .*lambda"),
        (adapter_on_the_head, "plain nn.Linear, got .*lora"),
        (quantised_head, "plain nn.Linear, got .*Quantised"),
        (normalised_head, "plain nn.Linear, got .*Parametrized"),
        (replaced_forward_of_the_head, "forward of the output layer was replaced"),
    ],
)
def test_model_is_refused_and_not_changed(model, message):
    model = model()
    before = type(model), vars(model).copy()
    with pytest.raises(TypeError, match=message):
        apply_to_model(model)
    assert (type(model), vars(model)) == before


def test_scaler_of_another_type_is_refused():
    with pytest.raises(TypeError, match="scaler: expected a GradScaler or None, got int"):
        apply_to_model(model_of(), scaler=3)


def adapter():
    model = apply_to_model(model_of())
    return get_peft_model(model, LoraConfig(target_modules=["lm_head"]))


def sharded_weight():
    model = apply_to_model(model_of())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach()[:50])
    return model


def unshifted_loss():
    config = config_of("bart", d_model=16, decoder_layers=2, decoder_attention_heads=2)
    return apply_to_model(AutoModelForCausalLM.from_config(config).train())


class OldLoss(LlamaForCausalLM):
    """A model with the loss that modeling files had before Transformers' loss functions."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)[..., :-1, :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[..., 1:].flatten())


class Normalised(OldLoss):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return self.loss_function(torch.log_softmax(logits, -1), labels, 97)


class ZLoss(OldLoss):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return self.loss_function(logits, labels, 97) + logits.logsumexp(-1).square().mean()


class ScaledByTensor(OldLoss):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state) * torch.ones(())
        return self.loss_function(logits, labels, 97)


class TwoCaps(OldLoss):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids).last_hidden_state)
        return self.loss_function(torch.tanh(torch.tanh(logits)), labels, 97)


class OwnProduct(OldLoss):
    def forward(self, input_ids=None, labels=None, **kwargs):
        hidden = self.model(input_ids).last_hidden_state
        logits = torch.nn.functional.linear(hidden, self.lm_head.weight)
        return {"loss": self.loss_function(logits, labels, 97), "logits": logits}


def made(kind):
    return lambda: apply_to_model(kind(config_of("llama")).train())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (adapter, "plain nn.Linear, got .*lora"),
        (sharded_weight, "expected a weight with 97 rows, got 50.*tensor parallelism"),
        (unshifted_loss, "this model reads .device"),
        (made(OldLoss), "this model indexes them"),
        (made(Normalised), "this model calls log_softmax"),
        (made(ZLoss), "this model reads .logsumexp"),
        (made(ScaledByTensor), "multiplies them by something else than a number"),
        (made(TwoCaps), "this model applies tanh twice"),
        (made(OwnProduct), "does not call its output layer"),
    ],
)
def test_first_training_step_is_refused(model, message):
    model = model()
    with pytest.raises((TypeError, AttributeError, ValueError), match=message):
        model(**batch())


def test_loss_function_that_was_set_later_gets_the_logits():
    model = apply_to_model(model_of())
    model.loss_function = own_loss().loss_function
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
    model = made(OldLoss)()
    reference = copy.deepcopy(model)
    with pytest.raises(TypeError):
        model(**batch())
    assert torch.equal(model.eval()(**batch()), reference.eval()(**batch()))


def test_replaced_output_layer_is_checked_at_the_next_step():
    model = pair_of()[1]
    model.lm_head = Quantised(16, 97, bias=False)
    with pytest.raises(TypeError, match=r"plain nn.Linear, got .*Quantised"):
        model(**batch())
