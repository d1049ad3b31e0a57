"""Mistakes that users make, and the errors and warnings that name the remedy."""

import re

import ampfuse
import numpy
import pytest
import torch
from ampfuse import ops
from torch import nn

LOGITS, TARGET = torch.zeros(8, 10), torch.zeros(8, dtype=torch.long)
HIDDEN, WEIGHT = torch.zeros(8, 4), torch.zeros(10, 4)


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


def load_state_of(other):
    loop = Loop().backward()
    optimizer = other(loop.model.parameters())
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


def step_without_backward():
    loop = Loop()
    loop.scaler.scale(torch.ones(()))
    loop.step()


def step_of_torchs_optimizer_without_backward():
    loop = Loop()
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1)
    loop.scaler.scale(torch.ones(()))
    loop.step()


def twice(method):
    loop = Loop().backward()
    getattr(loop.scaler, method)(loop.optimizer)
    getattr(loop.scaler, method)(loop.optimizer)


def clip(*tensors):
    ops.multi_tensor_clip(list(tensors), torch.ones(()), 1.0)


class Graphed(Loop):
    """A `GraphedStep` of a small model."""

    def __init__(self, **options):
        super().__init__()
        self.batch = (torch.ones(3, 4), torch.ones(3, 2))
        optimizer = options.get("optimizer", self.optimizer)
        self.step = ampfuse.GraphedStep(
            self.model, nn.functional.mse_loss, optimizer, self.scaler, self.batch
        )


def call_in_evaluation_mode():
    graphed = Graphed()
    graphed.model.eval()
    graphed.step(*graphed.batch)


def call_with_a_tuple():
    graphed = Graphed()
    graphed.step(graphed.batch)


def call_with_the_optimizer_of_another_model():
    graphed = Graphed(optimizer=Loop().optimizer)
    graphed.step(*graphed.batch)


FUSED = "AdamW: unexpected keyword argument '{}'; the step is always fused: drop foreach, fused"
RAISES = {
    "fused": (lambda: Loop(fused=True), TypeError, FUSED.format("fused")),
    "foreach": (lambda: Loop(foreach=True), TypeError, FUSED.format("foreach")),
    "max_norm": (
        lambda: Loop(max_norm=1),
        TypeError,
        "AdamW: unexpected keyword argument 'max_norm'; did you mean 'max_grad_norm'?",
    ),
    "lr as text": (
        lambda: Loop(lr="1e-3"),
        TypeError,
        "lr: expected a number or a tensor, got str '1e-3'",
    ),
    "state of SGD": (
        lambda: load_state_of(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)),
        KeyError,
        "group 0 lacks betas and eps: expected lr, betas, eps and weight_decay; is it the state of "
        "another optimizer?",
    ),
    "state of another shape": (
        load_state_of_another_shape,
        ValueError,
        "loaded state dict: exp_avg of parameter 0: expected shape (2, 5), got (2, 4)",
    ),
    "state of another object": (
        lambda: Loop().scaler.load_state_dict({"scale": 1.0}),
        KeyError,
        "GradScaler's state has no 'growth_factor'; it has scale. Is it the state of another",
    ),
    "sparse gradient": (
        step_on_sparse_gradient,
        RuntimeError,
        "Adam does not support sparse gradients, please consider SparseAdam instead. The parameter "
        "has shape (10, 4)",
    ),
    "remainder of float16": (
        lambda: ampfuse.AdamW([nn.Parameter(torch.ones(3).half())], master_weights="remainder"),
        ValueError,
        "master_weights='remainder': parameter 0 of group 0 is float16, and only bfloat16 has a "
        "remainder; use master_weights=True in a group of its own",
    ),
    "loss without scale": (
        step_without_scaling_the_loss,
        AssertionError,
        "Attempted step but _scale is None.  This may indicate your script did not use "
        "scaler.scale(loss or outputs)",
    ),
    "no backward": (
        step_without_backward,
        AssertionError,
        "No inf checks were recorded prior to update: no optimizer with gradients was stepped or "
        "unscaled by the scaler since the last update. Did you call scaler.scale(loss).backward() "
        "and scaler.step(optimizer)? If it is intended, pass GradScaler(allow_no_grads=True)",
    ),
    "no backward, torch's optimizer": (
        step_of_torchs_optimizer_without_backward,
        AssertionError,
        "No inf checks were recorded for this optimizer: none of its parameters has a gradient. "
        "Did you call scaler.scale(loss).backward()?",
    ),
    "unscale_ twice": (
        lambda: twice("unscale_"),
        RuntimeError,
        "unscale_() has already been called on this optimizer since the last update(). Is "
        "scaler.update() missing?",
    ),
    "step twice": (
        lambda: twice("step"),
        RuntimeError,
        "step() has already been called since the last update(). Is scaler.update() missing?",
    ),
    "growth_factor": (
        lambda: ampfuse.GradScaler("cpu", growth_factor=0.5),
        AssertionError,
        "The growth factor must be > 1.0",
    ),
    "min_scale": (
        lambda: ampfuse.GradScaler("cpu", min_scale=2.0**20),
        ValueError,
        "init_scale: expected at least min_scale=1048576.0, got 65536.0",
    ),
    "scale as device": (
        lambda: ampfuse.GradScaler(65536.0),
        TypeError,
        "device: expected a str like 'cuda', got 65536.0",
    ),
    "targets of a float dtype": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET.float()),
        ValueError,
        "cross_entropy: target: expected indices (int64, int32 or uint8), or probabilities of the "
        "shape of input, [8, 10], got float32 of shape [8]",
    ),
    "targets of int16": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET.short()),
        TypeError,
        "cross_entropy: target: expected indices (int64, int32 or uint8) or probabilities, got "
        "int16",
    ),
    "target out of range": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET + 10),
        IndexError,
        "Target 10 is out of bounds: in row 0, expected a class in [0, 10), or ignore_index if the "
        "row is padding",
    ),
    "classes last": (
        lambda: ampfuse.cross_entropy(torch.zeros(2, 5, 10), torch.zeros(2, 5).long()),
        ValueError,
        "Expected target size [2, 10], got [2, 5]; classes are dimension 1: pass "
        "logits.flatten(0, -2) and target.flatten()",
    ),
    "target of numpy": (
        lambda: ampfuse.cross_entropy(LOGITS, numpy.zeros(8, numpy.int64)),
        TypeError,
        "cross_entropy: target: expected a Tensor, got ndarray",
    ),
    "scaler for a function": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET, scaler=ampfuse.GradScaler("cpu")),
        TypeError,
        "cross_entropy: unexpected keyword argument 'scaler'; pass "
        "grad_scale=scaler.scale_tensor(), or use the module, which takes scaler=",
    ),
    "scaler for the function in place": (
        lambda: ampfuse.cross_entropy_(LOGITS, TARGET, scaler=ampfuse.GradScaler("cpu")),
        TypeError,
        "cross_entropy_: unexpected keyword argument 'scaler'; pass "
        "grad_scale=scaler.scale_tensor(), or use the module, which takes scaler=",
    ),
    "reduction in a list": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET, reduction=["mean"]),
        ValueError,
        """reduction: expected "none", "mean" or "sum", got ['mean']""",
    ),
    "scaler as grad_scale": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET, grad_scale=ampfuse.GradScaler("cpu")),
        TypeError,
        "grad_scale: expected a number, got GradScaler; pass scaler.scale_tensor()",
    ),
    "target on another device": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET.to("meta")),
        ValueError,
        "cross_entropy: target: expected input's device, cpu, got meta",
    ),
    "denominator 0": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET, denominator=0),
        ValueError,
        "denominator: expected a number other than 0",
    ),
    "denominator of a sum": (
        lambda: ampfuse.cross_entropy(LOGITS, TARGET, denominator=8, reduction="sum"),
        ValueError,
        'cross_entropy: denominator: only allowed with reduction="mean", got "sum"',
    ),
    "dtypes of a linear loss": (
        lambda: ampfuse.linear_cross_entropy(HIDDEN.bfloat16(), WEIGHT, TARGET),
        TypeError,
        "linear_cross_entropy: expected hidden, weight and bias of one dtype, or autocast, got "
        "hidden of bfloat16, weight of float32",
    ),
    "target out of range of a linear loss": (
        lambda: ampfuse.linear_cross_entropy(HIDDEN, WEIGHT, TARGET + 18),
        IndexError,
        "Target 18 is out of bounds: in row 0, expected a class in [0, 10)",
    ),
    "weight before hidden states": (
        lambda: ampfuse.linear_cross_entropy(WEIGHT, HIDDEN, TARGET),
        ValueError,
        "linear_cross_entropy: target: expected shape [10] for hidden states of shape [10, 4], got "
        "[8]; are hidden and weight swapped?",
    ),
    "logits for hidden states": (
        lambda: ampfuse.LinearCrossEntropyLoss(4, 10)(LOGITS, TARGET),
        ValueError,
        "linear_cross_entropy: hidden: expected 4 features, as weight has ([10, 4]), got 10; are "
        "these logits, or is weight not [classes, features]?",
    ),
    "list on two devices": (
        lambda: ops.multi_tensor_norm([torch.ones(2), torch.ones(2, device="meta")]),
        ValueError,
        "multi_tensor_norm: tensors[1]: expected device cpu, that of tensors[0], got meta",
    ),
    "list with None": (
        lambda: ops.multi_tensor_norm([torch.ones(2), None]),
        TypeError,
        "multi_tensor_norm: tensors[1]: expected a Tensor, got NoneType",
    ),
    "list that requires grad": (
        lambda: clip(torch.ones(2, requires_grad=True)),
        RuntimeError,
        "multi_tensor_clip: tensors[0]: a leaf Variable that requires grad is being used in an "
        "in-place operation; call it under torch.no_grad()",
    ),
    "list with an expanded tensor": (
        lambda: clip(torch.ones(1).expand(4)),
        ValueError,
        "multi_tensor_clip: tensors[0]: more than one element refers to the same memory location, "
        "so the tensor cannot be written; clone() it first",
    ),
    "ord as text": (
        lambda: ops.multi_tensor_norm([torch.ones(2)], ord="fro"),
        TypeError,
        "multi_tensor_norm: ord: expected 1, 2 or inf, got str",
    ),
    "ord 3": (
        lambda: ops.multi_tensor_norm([torch.ones(2)], ord=3),
        ValueError,
        "multi_tensor_norm: ord: expected 1, 2 or inf, got 3",
    ),
    "graph in evaluation mode": (
        call_in_evaluation_mode,
        RuntimeError,
        "GraphedStep: changed since the step was made: model.training; the model is in another "
        "mode: call model.train(), or make a new GraphedStep",
    ),
    "graph with a tuple": (
        call_with_a_tuple,
        TypeError,
        "batch: expected 2 tensors, as in sample, got 1; call step(*batch)",
    ),
    "graph with another optimizer": (
        call_with_the_optimizer_of_another_model,
        RuntimeError,
        "optimizer: none of its parameters got a gradient; does it have the model's parameters?",
    ),
    "decoupled_weight_decay of AdamW": (
        lambda: Loop(decoupled_weight_decay=False),
        TypeError,
        "AdamW: unexpected keyword argument 'decoupled_weight_decay'; it is always True in AdamW",
    ),
    "min_scale 0": (
        lambda: ampfuse.GradScaler("cpu", min_scale=0.0),
        ValueError,
        "min_scale: expected None or more than 0, got 0",
    ),
    "part of patch": (
        lambda: ampfuse.patch("optimizer"),
        ValueError,
        "expected parts among scaler, optimizers, cross_entropy, clip_grad_norm, got 'optimizer'; "
        "did you mean 'optimizers'?",
    ),
}


@pytest.mark.parametrize(("mistake", "error", "message"), RAISES.values(), ids=RAISES)
def test_error_names_the_mistake_and_the_remedy(mistake, error, message):
    with pytest.raises(error) as caught:
        mistake()

    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (lambda file: torch.save({"scale": 1.0}, file), "one of torch.save in Python; torch.load"),
        (lambda file: file.write_bytes(b"no archive"), "a damaged or different file"),
    ],
    ids=["archive of Python", "damaged archive"],
)
def test_error_names_the_kind_of_file_that_is_no_cpp_archive(tmp_path, write, found):
    write(tmp_path / "scaler.pt")

    message = f"scaler.pt: expected an archive of torch::save in C++, got {found}"
    with pytest.raises(ValueError, match=re.escape(message)):
        ampfuse.load_cpp_scaler_state(tmp_path / "scaler.pt")


def test_torchs_checkpoint_loads():
    load_state_of(torch.optim.AdamW)


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
        ampfuse.cross_entropy(LOGITS.as_subclass(Odd), TARGET)


def test_suggestion_is_an_argument_of_the_function():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'unknow'$"):
        Loop(unknow=1)
