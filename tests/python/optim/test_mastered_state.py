"""State dicts and copies of `ampfuse.Mastered`."""

import copy
import pickle
from functools import partial

import ampfuse
import pytest
import torch
import torch.distributed.checkpoint as dcp
from ampfuse import Mastered, checkpoint
from mastered_runs import (
    BF16,
    assert_all_same,
    made,
    made_with_optimizer,
    train,
)
from optim_models import copies
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


def by_state_dict(optimizer, params, folder):
    other, new = made_with_optimizer(params[0].dtype)
    other.load_state_dict(optimizer.state_dict())
    return other, new


def by_checkpoint(optimizer, params, folder):
    checkpoint.save(folder, step=1, optimizer=optimizer)
    other, new = made_with_optimizer(params[0].dtype)
    checkpoint.load(folder, optimizer=other)
    return other, new


def by_pickle(optimizer, params, folder):
    return pickle.loads(pickle.dumps((optimizer, params)))


def by_deepcopy(optimizer, params, folder):
    return copy.deepcopy((optimizer, params))


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("move", [by_state_dict, by_checkpoint, by_pickle, by_deepcopy])
def test_training_goes_on_with_the_same_bits(move, dtype, tmp_path):
    optimizer, params = made_with_optimizer(dtype)
    train(optimizer, params, range(3))
    moved, others = move(optimizer, params, tmp_path)
    if dtype == torch.float32 and move in (by_state_dict, by_checkpoint):
        with torch.no_grad():
            torch._foreach_copy_(others, params)
    assert_all_same(others, params)
    train(optimizer, params, range(3, 6))
    train(moved, others, range(3, 6))
    assert_all_same(others, params)
    assert_all_same(moved.master_params(), optimizer.master_params())


def test_state_dict_of_the_optimizer_alone_is_loaded_and_the_other_way_round():
    optimizer, params = made_with_optimizer(torch.float32)
    train(optimizer, params, range(3))
    theirs = copies(params)
    plain = torch.optim.NAdam(theirs)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ours = copies(params)
    again = Mastered(torch.optim.NAdam, ours)
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(plain, theirs, range(3, 6))
    train(again, ours, range(3, 6))
    assert_all_same(ours, theirs)


def test_masters_that_were_not_saved_are_made_from_the_model_that_is_loaded_later():
    optimizer, params = made_with_optimizer(BF16)
    train(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        del state["master_param"]
    other, new = made_with_optimizer(BF16)
    other.load_state_dict(saved)
    with torch.no_grad():
        torch._foreach_copy_(new, params)
    other.param_groups[0]["lr"] = 0.0
    train(other, new, [3])
    assert_all_same(other.master_params(), [param.float() for param in params])


def break_master(saved):
    saved["state"][1]["master_param"] = torch.ones(3)


def break_groups(saved):
    saved["param_groups"].append(saved["param_groups"][0])


@pytest.mark.parametrize(
    ("breaks", "error"),
    [
        (break_master, "master_param of parameter 1: expected shape"),
        (break_groups, "doesn't match the size of optimizer's group"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_loaded(breaks, error):
    optimizer, params = made_with_optimizer(BF16)
    train(optimizer, params, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    breaks(saved)
    other, new = made_with_optimizer(BF16)
    with pytest.raises(ValueError, match=error):
        other.load_state_dict(saved)
    train(other, new, range(3))
    assert_all_same(other.master_params(), optimizer.master_params())


def test_hooks_see_and_change_state_dicts():
    optimizer, params = made_with_optimizer(BF16)
    train(optimizer, params, [0])
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    seen = []
    optimizer.register_load_state_dict_pre_hook(lambda _, given: seen.append(given["more"]))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [1, "after"]


def test_own_state_dict_is_loaded_without_a_loss_of_bits():
    optimizer, params = made_with_optimizer(BF16)
    train(optimizer, params, range(3))
    masters = [master.clone() for master in optimizer.master_params()]
    optimizer.load_state_dict(optimizer.state_dict())  # its masters are the present ones
    assert_all_same(optimizer.master_params(), masters)


MAKERS = {
    "AdamW": torch.optim.AdamW,  # its groups have torch's own options
    "Muon": torch.optim.Muon,  # its groups have none
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_masters_are_loaded_unless_the_optimizer_alone_has_kept_them(make):
    params = made("cpu", BF16)
    optimizer = Mastered(make, params)
    train(optimizer, params, [0])
    loaded = Mastered(make, made("cpu", BF16))
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_all_same(loaded.master_params(), optimizer.master_params())
    alone = made("cpu", BF16)
    plain = make(alone)
    plain.load_state_dict(optimizer.state_dict())
    plain.param_groups[0]["lr"] = 0.1  # enough to move 16-bit weights
    train(plain, alone, range(1, 4))
    saved = plain.state_dict()
    assert "master_param" in saved["state"][0]
    again = copies(alone)
    new = Mastered(make, again)
    new.load_state_dict(saved)
    assert_all_same(again, alone)
    assert_all_same(new.master_params(), [param.float() for param in alone])


FUSED = {
    "AdamW": (ampfuse.AdamW, torch.optim.AdamW, {"lr": 0.01}),
    "SGD": (ampfuse.SGD, torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
}


@pytest.mark.parametrize("is_ours_first", [False, True])
@pytest.mark.parametrize(("fused", "inner", "options"), FUSED.values(), ids=FUSED)
def test_masters_go_to_the_fused_optimizers_and_back(fused, inner, options, is_ours_first):
    make = partial(inner, **options)
    makers = [partial(fused, **options), lambda params: Mastered(make, params)]
    first, second = makers if is_ours_first else reversed(makers)
    params, others = made("cpu", BF16), made("cpu", BF16)
    optimizer, moved = first(params), second(others)
    train(optimizer, params, range(3))
    moved.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_all_same(moved.master_params(), optimizer.master_params())
    train(optimizer, params, range(3, 5))
    train(moved, others, range(3, 5))
    masters = [list(map(torch.Tensor.detach, one.master_params())) for one in (optimizer, moved)]
    torch.testing.assert_close(*masters, rtol=1e-6, atol=1e-7)


def test_loaded_groups_keep_the_present_implementation():
    optimizer, params = made_with_optimizer(BF16)
    train(optimizer, params, [0])
    saved = optimizer.state_dict()
    assert not {"foreach", "capturable", "differentiable"} & saved["param_groups"][0].keys()
    new = Mastered(partial(torch.optim.NAdam, foreach=True), made("cpu", BF16))
    new.load_state_dict(saved)
    assert new.param_groups[0]["foreach"] is new.inner.param_groups[0]["foreach"] is True


class Trained:
    """A model and its optimizer, which torch.distributed.checkpoint saves and loads."""

    def __init__(self, make, seed):
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(BF16)
        self.params = list(self.model.parameters())
        self.optimizer = Mastered(make, self.params)

    def train(self, steps):
        train(self.optimizer, self.params, steps)
        self.optimizer.zero_grad()

    def tensors(self):
        states = self.optimizer.state_dict()["state"].values()
        tensors = [*self.params, *(value for state in states for value in state.values())]
        return [tensor.detach().clone() for tensor in tensors]


INNERS = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "no state": partial(torch.optim.SGD, lr=0.1),
    "NAdam": torch.optim.NAdam,
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("make", INNERS.values(), ids=INNERS)
def test_distributed_checkpoint_resumes_with_the_same_bits(make, flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved, loaded = Trained(make, 0), Trained(make, 1)
    list(loaded.optimizer.master_params())  # as a program that counts its weights
    saved.train(range(3))
    for run, use in ((saved, dcp.save), (loaded, dcp.load)):
        model, optimizer = get_state_dict(run.model, run.optimizer, options=options)
        use({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        loaded.model,
        loaded.optimizer,
        model_state_dict=model,
        optim_state_dict=optimizer,
        options=options,
    )
    torch.testing.assert_close(loaded.tensors(), saved.tensors(), rtol=0, atol=0)
    for run in (saved, loaded):
        run.train(range(3, 6))
    torch.testing.assert_close(loaded.tensors(), saved.tensors(), rtol=0, atol=0)
