"""The scenarios of a module run before its tests."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def played(request, tmp_path_factory):
    """Run what a module calls `scenario`, if it has one, on all ranks."""
    scenario = getattr(request.module, "scenario", None)
    if scenario is not None:
        scenario.play(tmp_path_factory.mktemp("ranks"))
