"""Records a training step, while its operators run dry."""

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ampfuse import _C
from ampfuse._graphs import is_in_backward
from ampfuse._nested import have_own_operators, params_of, states_of, stored_tensors_in
from ampfuse.optim import SGD
from ampfuse.tools.hooks import FirstOptimizer, hook_modules, hook_steps, only_measures, replace
from ampfuse.tools.memory.as_on_gpu import act_as_on_gpu
from ampfuse.tools.memory.dry_run import has_floats, run_dry
from ampfuse.tools.memory.record import BACKWARD, FORWARD, STEP, Allocation, Kind, Record, is_within
from ampfuse.tools.program_lines import current_line

GPU_MULTIPLE = 512  # torch allocates this many bytes on a GPU, or a multiple of it

# The numbers of c10::ScalarType, which operators take as arguments.
SCALAR_TYPES = {5: torch.float16, 6: torch.float32, 7: torch.float64, 15: torch.bfloat16}

LINEAR_LOSSES = ("ampfuse::linear_cross_entropy_forward", "ampfuse::linear_cross_entropy_backward")


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the allocations of a program in a block of code, as if it ran on the device.

    Moments are counted by operators and freed tensors. The memory that an operator allocates and
    frees itself is not seen, except that of ampfuse's losses.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str, after_step: Callable[[], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._for_gpu = device == "cuda"
        self.before_first_step: Callable[[Optimizer], None] | None = None  # called once for each
        self._after_step = after_step  # called after each step of the first optimizer
        self._first = FirstOptimizer()
        self._replacement = ""
        self.steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """The number of steps that each optimizer has taken."""
        self._fake_mode = FakeTensorMode()
        self._now = 0
        self._begin = 0
        self._live: dict[int, tuple[weakref.ref[Any], Allocation]] = {}
        self._all: list[Allocation] = []
        self._phases: list[tuple[int, str]] = []
        self._thread = threading.get_ident()
        self._stack: list[str] = []  # names of the modules that are running in this thread
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._blocks: list[str] = []
        self._operations: Counter[str] = Counter()
        self._unknown: dict[str, None] = {}  # lines, in their order
        self._stepping = 0  # number of optimizer steps that are running, one inside another
        self._exits = ExitStack()

    def __enter__(self) -> "Recorder":
        """Begin to record."""
        self._exits.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*when there are global hooks on modules.*")
        if self._for_gpu:
            self._exits.enter_context(act_as_on_gpu(self.sent))
        hook_modules(self._exits, self._enter_module, self._leave_module)
        hook_steps(self._exits, self._enter_step, self._leave_step)
        replace(self._exits, Distribution, "_validate_args", False)  # zeros are often not valid
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop recording."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._exits.close()

    @property
    def is_in_module(self) -> bool:
        """True while a module runs forward."""
        return bool(self._stack)

    def begin(self) -> None:
        """Let the record begin here."""
        self._begin = self._now
        self._phases.clear()
        self._operations.clear()
        self._all = [one for one in self._all if one.died is None]

    def record(self) -> Record:
        """Return what was recorded since `begin`."""
        allocations = list(self._all)
        if any(one.is_sent for one in allocations):  # other data is on the host
            allocations = [one for one in allocations if one.kind != Kind.DATA or one.is_sent]
        return Record(
            allocations,
            list(self._phases),
            list(self._blocks),
            Counter(self._operations),
            self._begin,
            self._now,
            self._for_gpu,
            self._replacement,
            list(self._unknown),
        )

    def note(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Record what tensors are for."""
        for tensor in stored_tensors_in(list(tensors)):
            self._seen(tensor).kind = kind

    def sent(self, tensor: Tensor) -> Tensor:
        """Return a copy of data that the program moves to a device; other tensors as they are."""
        for one in stored_tensors_in([tensor]):
            allocation = self._seen(one)
            if allocation.kind == Kind.DATA and not allocation.is_sent and not tensor.requires_grad:
                tensor = tensor.clone()
                allocation = self._seen(tensor)
            allocation.is_sent = tensor.numel() > 1  # a scaler moves its numbers, too
        return tensor

    def note_model(self, model: nn.Module) -> None:
        """Record the names of a model's modules, and what its parameters and buffers are."""
        for name, module in model.named_modules():
            self._names[module] = name or type(module).__name__
        self._blocks += blocks_of(model)
        self.note(Kind.PARAMETERS, model.parameters())
        self.note(Kind.BUFFERS, model.buffers())

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and record the memory of its results."""
        kwargs = kwargs or {}
        given = list(stored_tensors_in((args, kwargs)))
        if have_own_operators(given):
            return NotImplemented
        self._now += 1
        self._note_phase()
        inputs = [self._seen(tensor) for tensor in given]
        if self._phases[-1][1] == BACKWARD:
            for one in inputs:
                one.used = self._now if one.used is None else one.used
        are_unknown = [
            one.is_unknown or (has_floats(tensor) and tensor.numel() > 1)
            for one, tensor in zip(inputs, given, strict=True)
        ]
        if has_unknown_shape(operator, given, are_unknown):
            self._unknown[str(current_line() or operator.name())] = None
        results = run_dry(operator, args, kwargs, self._fake_mode)
        self._note_scratch(operator, args, results)
        self._count_operations(operator, args, kwargs, results)
        is_data = not (self._stack or any(tensor.requires_grad for tensor in given))
        for result in stored_tensors_in(results):
            allocation = self._seen(result, is_new=True)
            if allocation.born < self._now:
                continue  # it was written in place, or it is a view
            allocation.is_unknown = any(are_unknown) and not has_floats(result)
            allocation.phase = self._phases[-1][1]
            allocation.operator = operator.name().partition(".")[0]
            allocation.module = self._stack[-1] if self._stack else ""
            if operator is torch.ops.aten._to_copy.default and inputs[0].kind == Kind.PARAMETERS:
                allocation.kind = Kind.COPIES
            elif is_data and allocation.phase == FORWARD:
                allocation.kind = Kind.DATA
        self._now += 1
        return results

    def _count_operations(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> None:
        count = flop_registry.get(getattr(operator, "overloadpacket", None))
        if count is not None and self._phases[-1][1] == FORWARD:
            module = self._stack[-1] if self._stack else ""
            self._operations[module] += count(*args, **kwargs, out_val=results)

    def _note_scratch(self, operator: Any, args: tuple[Any, ...], results: Any) -> None:
        """Record the memory that an operator has allocated and freed itself."""
        loss = count_in_loss(operator, args, self._for_gpu)
        size = loss or (0 if self._for_gpu else count_on_cpu(operator, args, results))
        if size:
            kind = Kind.LOSS if loss else Kind.TEMPORARIES
            allocation = Allocation(size, torch.Size(), torch.uint8, self._now, kind=kind)
            allocation.died = self._now + 1  # while it is live, the results are allocated
            self._all.append(allocation)

    def _seen(self, tensor: Tensor, is_new: bool = False) -> Allocation:
        """Return the allocation of a tensor, which may be seen for the first time."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            size = storage.nbytes()
            if self._for_gpu:
                size = -(-size // GPU_MULTIPLE) * GPU_MULTIPLE
            allocation = Allocation(size, tensor.shape, tensor.dtype, self._now)
            if not is_new:  # it is older, and not the result of an operator
                allocation.born, allocation.kind = 0, Kind.DATA
            self._all.append(allocation)
            self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), allocation)
        return self._live[key][1]

    def _freed(self, key: int) -> None:
        self._now += 1
        self._live.pop(key)[1].died = self._now

    def _note_phase(self) -> None:
        # A closure runs inside a step, and with gradients.
        phase = STEP if self._stepping and not torch.is_grad_enabled() else FORWARD
        if is_in_backward():
            phase = BACKWARD
        if not self._phases or self._phases[-1][1] != phase:
            self._phases.append((self._now, phase))

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._stack and module not in self._names:
            self.note_model(module)
        name = self._names.get(module, type(module).__name__)
        self._stack.append(name)
        for tensor in stored_tensors_in(inputs):
            self._seen(tensor).inputs_of.add(name)

    def _leave_module(self, module: nn.Module, _: Any, outputs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        name = self._stack.pop()
        for tensor in stored_tensors_in(outputs):
            self._seen(tensor).output_of = name

    @only_measures
    def _enter_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer not in self.steps and self.before_first_step is not None:
            self.before_first_step(optimizer)
        self._stepping += 1
        params = params_of(optimizer)
        self.note(Kind.PARAMETERS, params)
        for param in stored_tensors_in(params):
            self._seen(param).is_trained = True
        self.note(Kind.GRADIENTS, (param.grad for param in params if param.grad is not None))

    @only_measures
    def _leave_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping -= 1
        if type(optimizer) is torch.optim.SGD or isinstance(optimizer, SGD):
            self._replacement = self._replacement or "SGD"
        for state in states_of(optimizer):
            if "exp_avg_sq" in state:
                self._replacement = "AdamW"
            for name, value in state.items():
                if isinstance(value, Tensor):
                    self.note(kind_of_state(name), [value])
        self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if self._after_step is not None and self._first.matches(optimizer):
            self._after_step()


def kind_of_state(name: str) -> str:
    """Return the kind of an entry of an optimizer's state."""
    if name == "ema_param":
        return Kind.AVERAGES
    return Kind.MASTERS if "master" in name else Kind.MOMENTS


def has_unknown_shape(operator: Any, given: list[Tensor], are_unknown: list[bool]) -> bool:
    """Return True if the shape of an operator's result depends on numbers that are unknown."""
    if torch.Tag.dynamic_output_shape not in getattr(operator, "tags", ()):
        return False
    masks = [i for i, tensor in enumerate(given) if tensor.dtype == torch.bool]
    if masks or operator is torch.ops.aten.index.Tensor:  # other indices have known shapes
        return any(are_unknown[i] for i in masks)
    return any(are_unknown)


def blocks_of(model: nn.Module) -> list[str]:
    """Return the names of the modules that a model repeats, for example its layers.

    These are the members of a Sequential or ModuleList, if there are at least two, all are of one
    class, and each has submodules. Modules inside of such members are not blocks. A model that
    repeats none has as blocks its own parts with submodules, if there are at least two. Those that
    update running statistics in forward are left out: computed again, they would do so twice.
    """
    found: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Sequential, nn.ModuleList)) or is_within(name, found):
            continue
        members = dict(module.named_children())
        kinds = {type(member) for member in members.values()}
        has_parts = all(any(member.children()) for member in members.values())
        if len(members) >= 2 and len(kinds) == 1 and has_parts:
            found += [f"{name}.{member}".lstrip(".") for member in members]
    parts = [name for name, part in model.named_children() if any(part.children())]
    blocks = found or (parts if len(parts) >= 2 else [])
    return [name for name in blocks if not updates_statistics(model.get_submodule(name))]


def updates_statistics(block: nn.Module) -> bool:
    """Return True if forward updates the running statistics of a normalization."""
    return any(
        module.training and getattr(module, "track_running_stats", False)  # as of BatchNorm
        for module in block.modules()
    )


def count_in_loss(operator: Any, args: tuple[Any, ...], for_gpu: bool) -> int:
    """Return the bytes that a linear cross-entropy allocates and frees; 0 for other operators."""
    if operator.name() not in LINEAR_LOSSES:
        return 0
    given = dict(zip((one.name for one in operator._schema.arguments), args, strict=False))
    dtype, logits_dtype = SCALAR_TYPES[given["dtype"]], SCALAR_TYPES[given["logits_dtype"]]
    if for_gpu and not (given["chunk_classes"] or given["group"]):
        logits_dtype = dtype  # the default on a GPU
    return _C.linear_cross_entropy_workspace(
        given["hidden"],
        given["weight"],
        dtype=dtype,
        logits_dtype=logits_dtype,
        weight_grad_dtype=SCALAR_TYPES[given["weight_grad_dtype"]],
        chunk_rows=given["chunk_rows"],
        chunk_classes=given["chunk_classes"],
        with_gradient=any(given["output_mask"]),
        on_gpu=for_gpu,
    )


def count_on_cpu(operator: Any, args: tuple[Any, ...], results: Any) -> int:
    """Return the bytes of copies that torch's operators for images and LSTMs make on a CPU.

    Convolutions copy weight and images to a layout of their own, and LSTMs weights and gates, as
    measured with torch 2.11. What they need on a GPU depends on the algorithm that cuDNN chooses,
    and is not counted.
    """
    match operator.name():
        case "aten::convolution":
            return int(results.nbytes + args[1].nbytes)
        case "aten::convolution_backward":
            return sum(one.nbytes for one in args[:3])
        case "aten::native_batch_norm_backward":
            return int(args[1].nbytes)
        case "aten::mkldnn_rnn_layer":
            gates = 4 * results[0].nbytes if args[0].dtype == torch.float32 else 0
            return int(args[1].nbytes + args[2].nbytes + gates)
        case "aten::mkldnn_rnn_layer_backward":
            weights, output = args[1].nbytes + args[2].nbytes, args[7].nbytes
            is_float32 = args[0].dtype == torch.float32
            return int(2 * weights + 5 * output if is_float32 else 3 * weights + 2 * output)
    return 0
