"""`apply_to_model` together with PEFT, torch.compile, Accelerate, DDP and FSDP2."""

import copy
import functools

import ampfuse
import pytest
import torch
import torch.distributed as dist
from ampfuse.integrations.causal_lm import apply_to_model
from causal_models import (
    assert_same_gradients,
    assert_same_step,
    batch,
    bfloat16_accelerator,
    model_of,
    pair_of,
    step,
)
from on_ranks import on_ranks
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from processes import Scenarios
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

LORA = functools.partial(LoraConfig, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
ADAPTERS = {
    "LoRA": LORA,
    "LoRA for causal models": functools.partial(LORA, task_type="CAUSAL_LM"),
    "trained head": functools.partial(LORA, modules_to_save=["lm_head"]),
    "prompt": functools.partial(PromptTuningConfig, task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def adapted(model, kind):
    torch.manual_seed(1)
    return get_peft_model(model, ADAPTERS[kind]())


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_have_the_same_gradients_whatever_is_applied_first(kind):
    theirs = adapted(model_of(), kind)
    for ours in (
        apply_to_model(adapted(model_of(), kind)),
        adapted(apply_to_model(model_of()), kind),
    ):
        assert_same_step(theirs.train(), ours)
        assert step(ours).logits is None
        expected, found = (model.eval()(**batch()) for model in (theirs, ours))
        assert torch.equal(found.logits, expected.logits)


def test_disabled_adapters_leave_the_original_output_layer():
    ours = adapted(apply_to_model(model_of()), "trained head")
    theirs = adapted(model_of(), "trained head")
    with torch.no_grad():
        for model in (theirs, ours):
            model.base_model.model.lm_head.modules_to_save["default"].weight.mul_(2)
    losses = [model(**batch()).loss for model in (theirs, ours)]
    with theirs.disable_adapter(), ours.disable_adapter():
        losses += [model(**batch()).loss for model in (theirs, ours)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=0.0)
    torch.testing.assert_close(losses[3], losses[2], rtol=1e-6, atol=0.0)
    assert losses[2] != losses[0]


def test_merged_adapters_leave_the_forward_in_place():
    model = adapted(apply_to_model(model_of()), "LoRA").merge_and_unload()
    assert model.train()(**batch()).logits is None


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "phi"])
def test_compiled_model_is_one_graph_and_gives_the_same_step(name):
    torch.compiler.reset()
    theirs, ours = pair_of(name)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for seed in (0, 1):
        inputs = batch(seed=seed)
        step(theirs, **inputs)
        outputs = step(compiled, **inputs)
        assert outputs.logits is None
        assert_same_gradients(theirs, ours)
    theirs, ours = (model.eval()(**batch()) for model in (theirs, compiled))
    torch.testing.assert_close(ours.logits, theirs.logits)


def test_accelerate_wraps_and_unwraps_the_changed_forward():
    accelerator = bfloat16_accelerator()
    theirs, ours = (accelerator.prepare(model) for model in pair_of())
    assert_same_step(theirs, ours, tolerance=1e-2)
    assert step(ours).logits is None
    unwrapped = accelerator.unwrap_model(ours, keep_fp32_wrapper=False)
    assert_same_step(model_of(), unwrapped)
    assert step(unwrapped).logits is None


def test_replicas_of_data_parallel_use_their_own_weights():
    expected, model = model_of(), apply_to_model(model_of())
    # torch.nn.parallel.replicate does this on GPUs: modules are copied without their parameters,
    # and get tensors in their place.
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    with torch.no_grad():
        for module, replica in replicas.items():
            for name, child in module.named_children():
                replica._modules[name] = replicas[child]
            for name, parameter in module._parameters.items():
                setattr(replica, name, parameter if parameter is None else parameter * 2)
        for parameter in expected.parameters():
            parameter.mul_(2)
    outputs = replicas[model](**batch())
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected(**batch()).loss, rtol=1e-6, atol=0.0)
    assert not model.lm_head.deferred


scenario = Scenarios()


def run_ddp(model):
    """Return the outputs of the second of two parts of a batch, after its backward pass."""
    model = DistributedDataParallel(model)
    with model.no_sync():
        model(**batch(seed=dist.get_rank()), num_items_in_batch=30).loss.backward()
    outputs = model(**batch(seed=2 + dist.get_rank()), num_items_in_batch=30)
    outputs.loss.backward()
    return outputs


@on_ranks(scenario)
def test_ddp_gives_the_same_gradients():
    theirs, ours = pair_of()
    expected, outputs = run_ddp(theirs), run_ddp(ours)
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=1e-6, atol=0.0)
    assert_same_gradients(theirs, ours)


def shard(model, **options):
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def run_sharded(model):
    """Return a training step's outputs, and the whole gradients as those of a plain model."""
    outputs = step(model, **batch(seed=dist.get_rank()))
    whole = model_of(tie_word_embeddings=model.config.tie_word_embeddings)
    for parameter, sharded in zip(whole.parameters(), model.parameters(), strict=True):
        parameter.grad = sharded.grad.full_tensor()
    return outputs, whole


@on_ranks(scenario, "tied", "untied", "bfloat16", "sharded first")
def test_fsdp2_gives_the_same_gradients(case):
    options = {}
    if case == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    theirs = model_of(tie_word_embeddings=case == "tied")
    ours = copy.deepcopy(theirs)
    if case == "sharded first":
        ours = apply_to_model(shard(ours, **options))
    else:
        ours = shard(apply_to_model(ours), **options)
    (expected, theirs), (outputs, ours) = run_sharded(shard(theirs, **options)), run_sharded(ours)
    tolerance = 1e-2 if case == "bfloat16" else 1e-6
    assert outputs.logits is None
    torch.testing.assert_close(outputs.loss, expected.loss, rtol=tolerance, atol=0.0)
    assert_same_gradients(theirs, ours, tolerance)


@on_ranks(scenario)
def test_output_layer_with_a_fully_shard_group_of_its_own_is_refused():
    after, before = apply_to_model(model_of()), model_of()
    messages = []
    for model in (after, before):
        fully_shard(model.lm_head, mesh=init_device_mesh("cpu", (2,)))
        shard(model)
        with pytest.raises(TypeError) as caught:
            apply_to_model(model)(**batch())
        messages.append(str(caught.value))
    assert "weight: expected a plain tensor, got a DTensor" in messages[0]
    assert "expected an output layer that is a plain nn.Linear" in messages[1]
    assert "fully_shard group of the output layer" in messages[1]


def test_optimizer_and_scaler_of_ampfuse_train_the_model():
    scaler = ampfuse.GradScaler("cpu", init_scale=256.0)
    model = apply_to_model(model_of().half(), scaler=scaler)
    optimizer = ampfuse.AdamW(model.parameters(), lr=3e-2)
    losses = []
    for _ in range(8):
        loss = model(**batch()).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    assert losses[-1] < losses[0] / 2
