"""Mistakes that users make, and the errors and warnings that name the remedy."""

import re

import ampfuse
import pytest
import torch
from ampfuse import cross_entropy, ops
from torch import nn

LOGITS, TARGET = torch.zeros(8, 10), torch.zeros(8, dtype=torch.long)
HIDDEN, WEIGHT = torch.zeros(8, 4), torch.zeros(10, 4)
BATCH = (torch.ones(3, 4), torch.ones(3, 2))
HALF = nn.Parameter(torch.ones(3).half())
SCALER = ampfuse.GradScaler("cpu")
SEQUENTIAL = nn.Sequential(nn.Linear(4, 2))


class Loop:
    """A model with one step of training, from which each mistake departs."""

    def __init__(self, **options):
        self.model = nn.Linear(4, 2)
        self.optimizer = ampfuse.AdamW(self.model.parameters(), **options)
        self.scaler = ampfuse.GradScaler("cpu")

    def backward(self):
        self.scaler.scale(self.model(torch.ones(3, 4)).sum()).backward()
        return self

    def step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Graphed(Loop):
    """A `GraphedStep` of a small model."""

    def __init__(self, optimizer=None, scaler=SCALER):
        super().__init__()
        loss, optimizer = nn.functional.mse_loss, optimizer or self.optimizer
        self.call = ampfuse.GraphedStep(self.model, loss, optimizer, scaler, BATCH)


def load_state_of(other, **options):
    loop = Loop().backward()
    optimizer = other(loop.model.parameters(), **options)
    optimizer.step()
    loop.optimizer.load_state_dict(optimizer.state_dict())


def load_state_of_another_shape():
    saved = Loop().backward()
    saved.optimizer.step()
    optimizer = ampfuse.AdamW(nn.Linear(5, 2).parameters())
    optimizer.load_state_dict(saved.optimizer.state_dict())


def step_on_sparse_gradient():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    ampfuse.AdamW(embedding.parameters()).step()


def step_without_scaling_the_loss():
    loop = Loop()
    loop.model(torch.ones(3, 4)).sum().backward()
    loop.step()


def step_without_backward(optimizer=None):
    loop = Loop()
    loop.optimizer = optimizer or loop.optimizer
    loop.scaler.scale(torch.ones(()))
    loop.step()


def twice(method):
    loop = Loop().backward()
    getattr(loop.scaler, method)(loop.optimizer)
    getattr(loop.scaler, method)(loop.optimizer)


def clip(tensor):
    ops.multi_tensor_clip([tensor], torch.ones(()), 1.0)


# Each mistake, and below it the error, of whose message this is a part. Tests of single functions
# have further mistakes.
MISTAKES = """
Loop(fused=True)
    TypeError: AdamW: unexpected keyword argument 'fused'; the step is always fused: drop foreach,
    fused
Loop(foreach=True)
    TypeError: AdamW: unexpected keyword argument 'foreach'; the step is always fused: drop foreach,
    fused
Loop(max_norm=1)
    TypeError: AdamW: unexpected keyword argument 'max_norm'; did you mean 'max_grad_norm'?
ampfuse.SGD(nn.Linear(4, 2).parameters(), lr=0.1, state_dtype=torch.bfloat16)
    TypeError: SGD: unexpected keyword argument 'state_dtype'; write momentum_dtype
Loop(decoupled_weight_decay=False)
    TypeError: AdamW: unexpected keyword argument 'decoupled_weight_decay'; it is always True in
    AdamW
Loop(lr="1e-3")
    TypeError: lr: expected a number or a tensor, got str '1e-3'
load_state_of(torch.optim.SGD, lr=0.1, momentum=0.9)
    KeyError: group 0 lacks betas and eps: expected lr, betas, eps and weight_decay; is it the state
    of another optimizer?
load_state_of_another_shape()
    ValueError: loaded state dict: exp_avg of parameter 0: expected shape (2, 5), got (2, 4)
step_on_sparse_gradient()
    RuntimeError: Adam does not support sparse gradients, please consider SparseAdam instead. The
    parameter has shape (10, 4)
ampfuse.AdamW([HALF], master_weights="remainder")
    ValueError: master_weights='remainder': parameter 0 of group 0 is float16, and only bfloat16 has
    a remainder; use master_weights=True in a group of its own
SCALER.load_state_dict({"scale": 1.0})
    KeyError: GradScaler's state has no 'growth_factor'; it has scale. Is it the state of another
step_without_scaling_the_loss()
    AssertionError: Attempted step but _scale is None: no loss was scaled. Did you call
    scaler.scale(loss).backward(), or pass scaler= to ampfuse.accumulate?
step_without_backward()
    AssertionError: No inf checks were recorded prior to update: no optimizer with gradients was
    stepped or unscaled by the scaler since the last update. Did you call
    scaler.scale(loss).backward() and scaler.step(optimizer)? If you did, was zero_grad() called
    between them, or are the optimizer's parameters those of another model? If it is intended, pass
    GradScaler(allow_no_grads=True)
step_without_backward(torch.optim.SGD([HALF], lr=0.1))
    AssertionError: No inf checks were recorded for this optimizer: none of its parameters has a
    gradient. Did you call scaler.scale(loss).backward()? If you did, was zero_grad() called after
    it, or are they the parameters of another model?
twice("unscale_")
    RuntimeError: unscale_() has already been called on this optimizer since the last update(). Is
    scaler.update() missing?
twice("step")
    RuntimeError: step() has already been called since the last update(). Is scaler.update()
    missing?
Loop().scaler.gate(Loop().optimizer)
    TypeError: gate: scheduler: expected a scheduler of torch.optim.lr_scheduler, got AdamW
ampfuse.checkpoint.save("run", step=1, best=0.4)
    TypeError: save: best: expected an object with state_dict and load_state_dict, got float;
    numbers and texts are saved in values={'best': ...}
ampfuse.GradScaler("cpu", growth_factor=0.5)
    AssertionError: The growth factor must be > 1.0
ampfuse.GradScaler(65536.0)
    TypeError: device: expected a str like 'cuda', got 65536.0
ampfuse.GradScaler("gpu")
    ValueError: device: expected a device of torch, 'cuda' or 'cpu', got 'gpu'
ampfuse.GradScaler(None)
    TypeError: device: expected a str like 'cuda', got None
Loop().scaler.step("adam")
    TypeError: optimizer: expected an optimizer, got str
Loop().scaler.unscale_(Loop().model.parameters())
    TypeError: optimizer: expected an optimizer, got generator
SCALER.scale(SEQUENTIAL)
    ValueError: outputs must be a Tensor or an iterable of Tensors, got Sequential
SCALER.scale(LOGITS.sum().item())
    ValueError: outputs must be a Tensor or an iterable of Tensors, got float: pass the loss itself,
    not loss.item()
ampfuse.CrossEntropyLoss(scaler=ampfuse.GradScaler)
    TypeError: scaler: expected a GradScaler, got the class GradScaler; write GradScaler()
ampfuse.LinearCrossEntropyLoss(4, 10, scaler=ampfuse.GradScaler)
    TypeError: scaler: expected a GradScaler, got the class GradScaler; write GradScaler()
ampfuse.clip_grad_norm_(nn.Linear(4, 2), 1.0)
    TypeError: parameters: expected tensors, got Linear: pass model.parameters()
ampfuse.clip_grad_norm_(SEQUENTIAL, 1.0)
    TypeError: parameters: expected tensors, got Sequential of Linear: pass model.parameters()
ampfuse.clip_grad_norm_(Loop().optimizer, 1.0)
    TypeError: parameters: expected tensors, got AdamW: pass model.parameters()
ampfuse.clip_grad_norm_(1.0, SEQUENTIAL.parameters())
    TypeError: parameters: expected tensors, got float: pass model.parameters()
ampfuse.clip_grads_with_norm_(SEQUENTIAL.named_parameters(), 1.0, LOGITS.sum())
    TypeError: parameters: expected tensors, got generator of tuple: pass model.parameters()
ampfuse.get_total_norm(nn.Linear(4, 2))
    TypeError: tensors: expected tensors, got Linear
ampfuse.accumulate([BATCH], lambda part, denominator: None)
    TypeError: accumulate: step: expected a function, got list of tuple of a tensor of torch.float32
    of shape [3, 4], a tensor of torch.float32 of shape [3, 2]: call accumulate(step, micro_batches)
cross_entropy(LOGITS, TARGET.float())
    ValueError: cross_entropy: target: expected indices (int64, int32 or uint8), or probabilities of
    the shape of input, [8, 10], got float32 of shape [8]
cross_entropy(LOGITS, TARGET.short())
    TypeError: cross_entropy: target: expected indices (int64, int32 or uint8) or probabilities, got
    int16
cross_entropy(LOGITS, TARGET + 10)
    IndexError: Target 10 is out of bounds: in row 0, expected a class in [0, 10), or ignore_index
    if the row is padding
cross_entropy(torch.zeros(2, 5, 10), torch.zeros(2, 5).long())
    ValueError: Expected target size [2, 10], got [2, 5]; classes are dimension 1: pass
    logits.flatten(0, -2) and target.flatten()
cross_entropy(LOGITS, TARGET, scaler=SCALER)
    TypeError: cross_entropy: unexpected keyword argument 'scaler'; pass
    grad_scale=scaler.scale_tensor(), or use the module, which takes scaler=
ampfuse.cross_entropy_(LOGITS, TARGET, scaler=SCALER)
    TypeError: cross_entropy_: unexpected keyword argument 'scaler'; pass
    grad_scale=scaler.scale_tensor(), or use the module, which takes scaler=
cross_entropy(LOGITS, TARGET, grad_scale=SCALER)
    TypeError: grad_scale: expected a number, got GradScaler; pass scaler.scale_tensor()
cross_entropy(LOGITS, TARGET, reduction=["mean"])
    ValueError: reduction: expected "none", "mean" or "sum", got ['mean']
ampfuse.linear_cross_entropy(HIDDEN.bfloat16(), WEIGHT, TARGET)
    TypeError: linear_cross_entropy: expected hidden, weight and bias of one dtype, or autocast, got
    hidden of bfloat16, weight of float32
ampfuse.linear_cross_entropy(HIDDEN, WEIGHT, TARGET + 18)
    IndexError: Target 18 is out of bounds: in row 0, expected a class in [0, 10)
ampfuse.linear_cross_entropy(WEIGHT, HIDDEN, TARGET)
    ValueError: linear_cross_entropy: target: expected shape [10] for hidden states of shape
    [10, 4], got [8]; are hidden and weight swapped?
ampfuse.LinearCrossEntropyLoss(4, 10)(LOGITS, TARGET)
    ValueError: linear_cross_entropy: hidden: expected 4 features, as weight has ([10, 4]), got 10;
    are these logits, or is weight not [classes, features]?
ops.multi_tensor_norm([HIDDEN], ord="fro")
    TypeError: multi_tensor_norm: ord: expected 1, 2 or inf, got str
clip(torch.ones(2, requires_grad=True))
    RuntimeError: multi_tensor_clip: tensors[0]: a leaf Variable that requires grad is being used in
    an in-place operation; call it under torch.no_grad()
clip(torch.ones(1).expand(4))
    ValueError: multi_tensor_clip: tensors[0]: more than one element refers to the same memory
    location, so the tensor cannot be written; clone() it first
Graphed(scaler=None)
    TypeError: scaler: expected ampfuse.GradScaler, got None: pass GradScaler(enabled=False) if
    losses are not scaled
Graphed().call(BATCH)
    TypeError: batch: expected 2 tensors, as in sample, got 1; call step(*batch)
Graphed(Loop().optimizer).call(*BATCH)
    RuntimeError: optimizer: none of its parameters got a gradient; does it have the model's
    parameters?
ampfuse.patch("optimizer")
    ValueError: expected parts among scaler, optimizers, cross_entropy, clip_grad_norm, got
    'optimizer'; did you mean 'optimizers'?
"""
CASES = re.findall(r"^(\S.*)\n((?: {4}.*\n)+)", MISTAKES, re.MULTILINE)


@pytest.mark.parametrize(("mistake", "expected"), CASES, ids=[mistake for mistake, _ in CASES])
def test_error_names_the_mistake_and_the_remedy(mistake, expected):
    kind, message = re.sub(r"\n {4}", " ", expected.strip()).split(": ", 1)

    with pytest.raises(Exception) as caught:  # noqa: PT011
        eval(mistake)

    assert type(caught.value).__name__ == kind
    assert message in str(caught.value)


def test_history_without_history_argument_is_warned_about():
    with pytest.warns(UserWarning, match=r"make it with GradScaler\(history=100\)"):
        assert ampfuse.GradScaler("cpu").history() == []


def test_model_that_is_loaded_behind_its_masters_is_warned_about():
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = ampfuse.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    with torch.no_grad():
        param.fill_(7.0)

    with pytest.warns(UserWarning, match=r"After loading a model call optimizer.sync_masters"):
        optimizer.step()


def test_error_of_another_operator_stays_its_own():
    class Odd(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return torch.ops.aten.add.Tensor(torch.ones(1), "s")

    with pytest.raises(RuntimeError, match=r"aten::add\(\) Expected"):
        cross_entropy(LOGITS.as_subclass(Odd), TARGET)


def test_suggestion_is_an_argument_of_the_function():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'unknow'$"):
        Loop(unknow=1)
