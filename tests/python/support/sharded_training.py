"""A small training program on two ranks, whose model is sharded or replicated."""

import ampfuse
import checkpointed
import torch
import torch.distributed as dist
from checkpointed import Training
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

SHARDED = (
    "float32",
    "torch's AdamW",
    "SGD with masters",
    "bfloat16 with masters",
    "bfloat16 with remainders",
    "float16 with masters",
    "8-bit moments",
    "background",
    "replicated",
)
# Each rank has a whole model, with batch norm.
DATA_PARALLEL = {
    "data parallel": {},
    "data parallel, background": {"dtype": torch.bfloat16, "master_weights": True},
}


def training(seed, kind, *, ranks=2):
    """Return a training of this kind on two ranks, or of the whole model on one."""
    if kind in DATA_PARALLEL:
        made = Training.of(seed, **DATA_PARALLEL[kind])
        if ranks == 2:
            made.model = DistributedDataParallel(made.model)
    else:
        made = sharded(seed, kind, ranks)
    if ranks == 2:
        torch.manual_seed(100 * seed + dist.get_rank())
    return made


def sharded(seed, kind, ranks):
    """Return a training whose model is sharded over two ranks, with shards of two sizes."""
    options = {"make": ampfuse.AdamW, "dtype": torch.float32} | checkpointed.KINDS.get(kind, {})
    make, dtype = options.pop("make"), options.pop("dtype")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 15), nn.Dropout(0.3), nn.ReLU(), nn.Linear(15, 4)).to(dtype)
    if ranks == 2:
        sizes, names = ((2, 1), ("all", "shards")) if kind == "replicated" else ((2,), ("all",))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
    optimizer = make(model.parameters(), lr=0.05, **options)
    scaler = ampfuse.GradScaler("cpu", growth_interval=3, history=8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    return Training(model, optimizer, scaler, scheduler)


def whole(tensors):
    every = [one.full_tensor() if isinstance(one, DTensor) else one for one in tensors]
    return [one.clone() for one in every]


def grads_of(model):
    return whole(param.grad for param in model.parameters())
