"""`apply_to_model`: training steps without the logits equal those of the model itself."""

import copy
import inspect
import pickle
import re
from unittest import mock

import ampfuse
import pytest
import torch
from ampfuse.integrations import _deferred_logits
from ampfuse.integrations.causal_lm import apply_to_model
from causal_models import OPTIONS, assert_same_step, batch, model_of, pair_of, step
from harness.memory import extra_peak
from packaging_tools import ROOT
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("name", OPTIONS)
def test_loss_and_gradients_equal_those_of_the_model_itself(name):
    assert_same_step(*pair_of(name))


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi", "gemma2", "cohere"])
def test_output_layer_may_share_the_weight_of_the_embedding_or_have_its_own(name):
    is_tied = model_of(name).config.tie_word_embeddings  # as in the test of all architectures
    assert_same_step(*pair_of(name, tie_word_embeddings=not is_tied))


@pytest.mark.parametrize("name", ["cohere", "gemma2"])
def test_bias_of_the_output_layer_is_scaled_like_the_logits(name):
    theirs, ours = (model_of(name) for _ in range(2))
    for model in (theirs, ours):
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-2, 2, 97))
    assert_same_step(theirs, apply_to_model(ours))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_outputs_have_all_fields_except_the_logits(name):
    flags = {"output_hidden_states": True, "output_attentions": True}
    theirs, ours = (step(model, **flags) for model in pair_of(name, attn_implementation="eager"))
    assert type(ours) is type(theirs)
    assert ours.logits is None
    assert list(ours.keys()) == [key for key in theirs.keys() if key != "logits"]  # noqa: SIM118
    assert len(ours.hidden_states) == 3
    for field in ("hidden_states", "attentions"):
        torch.testing.assert_close(ours[field], theirs[field], rtol=0.0, atol=0.0)
    assert ours.cache.get_seq_length() == theirs.cache.get_seq_length() == 11


def test_tuples_have_none_in_the_place_of_the_logits():
    theirs, ours = (model(**batch(), return_dict=False) for model in pair_of())
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=0.0)
    assert len(ours) == len(theirs)
    assert ours[1] is None


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral"])
def test_other_calls_return_logits_and_the_same_bits(name):
    models, inputs = pair_of(name), batch()
    tokens = {"input_ids": inputs["input_ids"]}
    for is_trained, given in ((False, inputs), (True, tokens), (True, tokens | {"labels": None})):
        theirs, ours = (model.train(is_trained)(**given) for model in models)
        assert torch.equal(ours.logits, theirs.logits)
        assert (ours.loss is None) == (theirs.loss is None) == is_trained
        assert ours.loss is None or torch.equal(ours.loss, theirs.loss)


def test_accumulate_with_the_models_own_loss_has_the_gradients_of_the_whole_batch():
    """The block of docs/accumulation.md is right for any number of labels in a micro-batch."""
    page = (ROOT / "docs/accumulation.md").read_text()
    (block,) = re.findall(r"```\n(step = .*?)```", page, re.DOTALL)
    names = {"ampfuse": ampfuse, "model": model_of(), "scaler": None}
    whole = model_of()
    names["micro_batches"] = [{k: v[i : i + 1] for k, v in batch().items()} for i in range(2)]
    exec(block, names)
    torch.testing.assert_close(names["loss"], step(whole).loss.detach())
    for ours, theirs in zip(names["model"].parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


LABELS = batch()["labels"]
SHIFTED = batch(seed=1)["labels"]
ARGUMENTS = [
    *({"num_items_in_batch": number} for number in (13, torch.tensor(13), torch.tensor(13.0))),
    *({"shift_labels": labels} for labels in (SHIFTED, SHIFTED.flatten())),
    {"labels": LABELS.where(LABELS >= 0, 5), "ignore_index": 5},
    {"labels": LABELS[:, -6:], "logits_to_keep": 6},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=lambda arguments: list(arguments)[-1])
def test_argument_of_the_call_is_used(arguments):
    assert_same_step(*pair_of(), **arguments)


def test_labels_may_be_a_positional_argument():
    inputs = batch()
    arguments = (inputs["input_ids"], None, None, None, None, inputs["labels"])
    theirs, ours = (model(*arguments) for model in pair_of())
    torch.testing.assert_close(ours.loss, theirs.loss, rtol=1e-6, atol=0.0)
    assert ours.logits is None


@pytest.mark.parametrize("number", [None, 8])
def test_batch_whose_labels_are_all_ignored_is_as_in_transformers(number):
    labels = torch.full((2, 11), -100)
    models = pair_of()
    theirs, ours = (step(m, labels=labels, num_items_in_batch=number) for m in models)
    torch.testing.assert_close(ours.loss, theirs.loss, equal_nan=True)
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, equal_nan=True)


def test_gradients_add_up_over_the_parts_of_a_batch():
    models = pair_of()
    for model in models:
        for seed in range(3):
            model(**batch(seed=seed), num_items_in_batch=40).loss.backward()
    theirs, ours = (torch.cat([p.grad.flatten() for p in m.parameters()]) for m in models)
    assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_step(reentrant):
    models = pair_of()
    for model in models:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_step(*models)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16bit_loss_is_as_close_to_float32_as_that_of_the_model_itself(dtype):
    for name in ("llama", "phi", "gemma2", "cohere"):
        exact = step(model_of(name).to(dtype).float()).loss
        theirs, ours = (step(model.to(dtype)).loss for model in pair_of(name))
        assert ours.dtype == theirs.dtype == torch.float32
        assert abs(ours - exact) <= 1.5 * abs(theirs - exact) + 1e-3, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16bit_gradients_have_the_dtype_of_the_parameters(dtype):
    theirs, ours = (model.to(dtype) for model in pair_of())
    assert_same_step(theirs, ours, tolerance=2e-2)
    assert all(parameter.grad.dtype == dtype for parameter in ours.parameters())


def test_autocast_gives_the_same_step():
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_step(*pair_of(), tolerance=1e-2)


@pytest.mark.parametrize("scaler_of", [ampfuse.GradScaler, torch.amp.GradScaler])
def test_loss_expects_the_gradient_of_the_scaler(scaler_of, monkeypatch):
    recording = mock.Mock(wraps=ampfuse.linear_cross_entropy)
    monkeypatch.setattr(_deferred_logits, "linear_cross_entropy", recording)
    scaler = scaler_of("cpu", init_scale=1024.0)
    theirs, ours = model_of().half(), apply_to_model(model_of(), scaler=scaler).half()
    for model in (theirs, ours):
        scaler.scale(model(**batch()).loss).backward()
    assert [float(call.kwargs["grad_scale"]) for call in recording.call_args_list] == [1024.0]
    grads = [torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (theirs, ours)]
    assert (grads[1] - grads[0]).float().norm() <= 2e-2 * grads[0].float().norm()


def test_second_call_replaces_the_scaler():
    model, scaler = model_of(), ampfuse.GradScaler("cpu")
    kind = type(apply_to_model(model))
    assert type(apply_to_model(model, scaler=scaler)) is kind
    assert model.loss_function.scaler is scaler


def test_experts_router_has_its_loss():
    theirs, ours = (step(model) for model in pair_of("mixtral"))
    assert torch.equal(ours.aux_loss, theirs.aux_loss)
    assert ours.loss > step(pair_of("mixtral", router_aux_loss_coef=0.0)[1]).loss


def test_model_generates_the_same_tokens_in_training_and_in_eval_mode():
    theirs, ours = pair_of()
    prompt = batch()["input_ids"]
    for model in (theirs, ours):
        step(model)
    for train in (True, False):
        tokens = [
            model.train(train).generate(prompt, max_new_tokens=5, do_sample=False)
            for model in (theirs, ours)
        ]
        assert torch.equal(*tokens)


def test_checkpoints_are_those_of_the_model_itself(tmp_path):
    theirs, ours = pair_of()
    step(ours)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], tensor)
    ours.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    assert type(loaded) is type(theirs)
    assert_same_step(loaded, ours)
    assert ours.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize("of", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_train_their_own_weights_without_logits(of):
    theirs, ours = pair_of()
    copied = of(ours)
    assert type(copied) is type(ours)
    ours.zero_grad()
    assert_same_step(theirs, copied)
    assert step(copied).logits is None
    assert all(parameter.grad is None for parameter in ours.parameters())


def test_resized_output_layer_is_used():
    theirs, ours = pair_of()
    for model in (theirs, ours):
        torch.manual_seed(1)
        model.resize_token_embeddings(120, mean_resizing=False)
    assert_same_step(theirs, ours)
    assert step(ours).logits is None


def test_model_returns_logits_after_a_step_that_raised():
    model = apply_to_model(model_of())
    with pytest.raises((RuntimeError, ValueError)):
        model(**batch() | {"labels": torch.zeros(3, 5, dtype=torch.long)})
    assert isinstance(model(batch()["input_ids"]).logits, torch.Tensor)


def test_model_has_the_class_and_the_signature_of_before():
    theirs, ours = pair_of()
    assert isinstance(ours, type(theirs))
    assert repr(type(ours)) == repr(type(theirs))
    assert inspect.signature(ours.forward) == inspect.signature(theirs.forward)


# No tensor has the size of all logits, in forward or backward.
CLASSES, ROWS, LENGTH = 32000, 4, 256
LOGITS = ROWS * LENGTH * CLASSES
WEIGHT = CLASSES * 16


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements among the results of operators."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **kwargs or {})
        for tensor in torch.utils._pytree.tree_iter(results):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return results


def with_many_classes():
    return pair_of(vocab_size=CLASSES, max_position_embeddings=LENGTH, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def inputs():
    tokens = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def test_no_operator_returns_a_tensor_of_the_size_of_the_logits(inputs):
    largest = []
    for model in with_many_classes():
        with LargestTensor() as mode:
            step(model, **inputs)
        largest.append(mode.elements)
    assert largest[0] >= LOGITS
    # The largest tensors are attention's, of the length's square, and the weight's gradient.
    assert largest[1] <= max(WEIGHT, ROWS * 2 * LENGTH * LENGTH) < LOGITS / 8


def test_step_allocates_a_fraction_of_the_logits(inputs):
    def peak(model):
        step(model, **inputs)  # allocates the gradients
        return extra_peak(torch.device("cpu"), lambda: model(**inputs).loss.backward())

    theirs, ours = (peak(model) for model in with_many_classes())
    assert theirs >= 2 * 4 * LOGITS
    # A CPU takes 64 MiB of float32 logits at a time.
    assert ours <= 2**26 + 16 * WEIGHT < 4 * LOGITS
