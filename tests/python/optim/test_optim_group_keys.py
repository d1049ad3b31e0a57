"""Keys of parameter groups that are no options are kept, with a warning if they look misspelled."""

from functools import partial

import ampfuse
import pytest
import torch
from torch.nn import Parameter

SCHEDULERS = {
    "OneCycleLR": {"max_lr": 1.0, "total_steps": 9},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 1.0},
}


@pytest.mark.parametrize("make", [ampfuse.AdamW, partial(ampfuse.SGD, momentum=0.9)])
def test_groups_keep_the_keys_of_schedulers_and_of_programs(make):
    groups = []
    for name, options in SCHEDULERS.items():
        scheduled = make([Parameter(torch.ones(3))], lr=0.1)
        getattr(torch.optim.lr_scheduler, name)(scheduled, **options)
        torch.optim.swa_utils.SWALR(scheduled, swa_lr=0.1)
        groups += scheduled.param_groups
    keys = ["name", "lr_scale", "group_name", "layer", "max_weight_decay", "beta1"]
    groups += [{"params": Parameter(torch.ones(3)), **dict.fromkeys(keys, 0.5)}]
    optimizer = make(groups, lr=0.1)
    kept = {"initial_lr", "max_lr", "min_lr", "swa_lr", *keys}
    assert kept <= {key for group in optimizer.param_groups for key in group}


@pytest.mark.parametrize("key", ["max_norm", "max_grad_nrom"])
def test_misspelled_option_of_a_group_gives_a_warning(key):
    group = {"params": [torch.zeros(2)], key: 1.0}
    with pytest.warns(UserWarning, match=f"SGD: {key} is no option .* did you mean 'max_grad_n"):
        ampfuse.SGD([group], lr=0.1)
