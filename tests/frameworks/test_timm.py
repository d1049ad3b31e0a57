"""timm's models and its scaler's wrapper with our optimizer and scaler."""

import ampfuse
import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from timm.utils import NativeScaler
from torch.nn import functional


def train(make, scaler=None, clip=None, dtype=torch.float32):
    """Take steps as timm's training script does; return losses."""
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=10)
    optimizer = make(model.parameters(), lr=1e-3)
    wrapped = NativeScaler("cpu")
    if scaler is not None:
        wrapped._scaler = scaler
    losses = []
    for _ in range(4):
        images, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            loss = functional.cross_entropy(model(images).float(), labels)
        wrapped(loss, optimizer, clip_grad=clip, parameters=model.parameters())
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_those_of_torch(clip, dtype):
    expected = train(torch.optim.AdamW, clip=clip, dtype=dtype)
    found = train(ampfuse.AdamW, ampfuse.GradScaler("cpu"), clip, dtype)
    assert found == pytest.approx(expected, rel=1e-4 if dtype == torch.float32 else 2e-2)


def test_groups_of_timm_are_accepted():
    model = timm.create_model("test_resnet", num_classes=10)
    optimizer = ampfuse.AdamW(param_groups_weight_decay(model, 0.1), lr=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
