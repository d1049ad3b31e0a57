"""The private names of torch that ampfuse uses still exist."""

import ast
import pkgutil
from pathlib import Path

import ampfuse
import torch

ROOT = Path(__file__).parents[3]
MODULES = {
    "torch": "_C _dynamo _foreach_copy_ _foreach_div_ _foreach_mul_ _foreach_norm",
    "torch._C": "_autograd _current_autograd_node _cuda_getArchFlags _current_graph_task_id "
    "_functorch _get_tracing_state _jit_get_schemas_for_operator",
    "torch._C._autograd": "_get_sequence_nr",
    "torch._C._functorch": "maybe_current_level",
    "torch._compile": "_disable_dynamo",
    "torch._dynamo": "mark_static_address",
    "torch._dynamo.utils": "counters",
    "torch._guards": "TracingContext",
    "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode",
    "torch._subclasses.functional_tensor": "FunctionalTensor",
    "torch.amp.grad_scaler": "_refresh_per_optimizer_state",
    "torch.autograd": "_engine_run_backward",
    "torch.autograd.Variable": "_execution_engine",
    "torch.autograd.forward_ad": "_current_level",
    "torch.distributed.ProcessGroup": "_device_types",
    "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
    "torch.overrides": "_get_current_function_mode_stack",
    "torch.utils._device": "DeviceContext",
    "torch.utils._python_dispatch": "TorchDispatchMode _get_current_dispatch_mode",
    "torch.utils._pytree": "tree_iter tree_map",
    "torch.utils.data._utils.fetch": "_IterableDatasetFetcher _MapDatasetFetcher",
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
}
PARAMETER = torch.nn.Parameter(torch.ones(1))
OPTIMIZER = torch.optim.SGD([PARAMETER])
# A scheduler wraps the optimizer's step, which then records that it was called (_opt_called).
torch.optim.lr_scheduler.ConstantLR(OPTIMIZER)
OPTIMIZER.step()
OBJECTS = {
    (PARAMETER * 2).grad_fn: "_input_metadata _saved_other _sequence_nr",
    torch.nn.functional.mse_loss(PARAMETER, torch.ones(1)).grad_fn: "_saved_reduction",
    torch.amp.GradScaler("cpu"): "_check_inf_per_device _check_scale_growth_tracker _enabled "
    "_get_scale_async _growth_tracker _init_scale _lazy_init_scale_growth_tracker _maybe_opt_step "
    "_per_optimizer_states _scale _unscale_grads_",
    torch.compile(torch.nn.Identity()): "_orig_mod",
    OPTIMIZER.step: "_wrapped_by_lr_sched",
    torch.optim.Adam([PARAMETER], fused=True): "_step_supports_amp_scaling",
    OPTIMIZER: "_opt_called _optimizer_load_state_dict_post_hooks "
    "_optimizer_load_state_dict_pre_hooks _optimizer_step_post_hooks _optimizer_step_pre_hooks",
    torch.nn.Module(): "_buffers _parameters",
    iter(torch.utils.data.DataLoader([1])): "_index_sampler",
    PARAMETER: "_values _version",
    PARAMETER.untyped_storage(): "_cdata",
    torch.ops.aten: "_to_copy",
    torch.ops.aten.add.Tensor: "_schema",
}
# ampfuse sets _dynamo_marked_constant for torch, which may ignore it. Instances of FSDP1 have
# _handle, on which the tests of join_ranks depend. The others are Python's.
OTHERS = {"_asdict", "_exit", "_dynamo_marked_constant", "_current_frames", "_fields", "_getframe"}
OTHERS |= {"_get_module_details", "_handle", "_replace"}


def test_torch_has_the_private_names_in_use():
    only_with_cuda = {"_cuda_getArchFlags"} if torch.version.cuda is None else set()
    holders = [(module, pkgutil.resolve_name(module), names) for module, names in MODULES.items()]
    holders += [(type(holder).__name__, holder, names) for holder, names in OBJECTS.items()]
    missing = [
        f"{place}: {name}"
        for place, holder, names in holders
        for name in {*names.split()} - only_with_cuda
        if not hasattr(holder, name)
    ]
    assert missing == []


def private_names_used():
    """Return the names with a leading underscore that ampfuse uses and does not itself define."""
    used, own = set(), set()
    for file in [*Path(ampfuse.__file__).parent.rglob("*.py"), ROOT / "setup.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.Attribute(value=value, attr=name, ctx=context):
                    if isinstance(context, ast.Store) and ast.unparse(value) == "self":
                        own.add(name)
                    used.add(name)
                case (
                    ast.FunctionDef(name=name)
                    | ast.ClassDef(name=name)
                    | ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    own.add(name)
                case ast.ImportFrom(module=str(module), names=names):
                    if module.startswith("torch"):
                        used.update(module.split("."), (alias.name for alias in names))
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, argument, *_]):
                    if isinstance(argument, ast.Constant):
                        used.add(argument.value)
    return {name for name in used - own if name.startswith("_") and not name.startswith("__")}


def test_every_private_name_in_use_is_listed():
    listed = {name for names in [*MODULES.values(), *OBJECTS.values()] for name in names.split()}
    listed.update(part for module in MODULES for part in module.split("."))
    assert private_names_used() - listed - OTHERS == set()
