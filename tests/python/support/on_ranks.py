"""Tests that ranks run together, in the processes of a `Scenarios` that is called `scenario`."""

import functools
import inspect

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def played(request, tmp_path_factory):
    """Run what a module calls `scenario`, if it has one, on all ranks before its tests."""
    scenario = getattr(request.module, "scenario", None)
    if scenario is not None:
        scenario.play(tmp_path_factory.mktemp("ranks"))


def on_ranks(scenario, *cases):
    """Return a decorator of a test that all ranks run, with each case if it has an argument.

    A rank does not notice that another one fails. So assertions follow the last collective.
    """

    def register(function):
        names = [*inspect.signature(function).parameters]

        @functools.wraps(function)
        def test(*of_rank, **of_test):
            if dist.is_initialized():
                function(*of_rank[: len(names)])
                return {}
            scenario.results(function.__name__, of_test[names[0]] if names else None)
            return None

        scenario(*(cases or [None]))(test)
        return pytest.mark.parametrize(names[0], cases, ids=str)(test) if names else test

    return register
