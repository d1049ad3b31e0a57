"""The names of modules in the program, and the elements of tensors that are compared."""

import pytest
import torch
from ampfuse.precision._modules import without_wrappers
from ampfuse.precision._samples import sample


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 1000])
def test_sample_has_at_most_the_elements_that_are_wanted(count):
    assert 1 <= sample(torch.zeros(count), 64).numel() <= 64


@pytest.mark.parametrize(
    "name", ["layer.0", "module.layer.0", "_orig_mod.layer.0", "module._orig_mod.layer.0"]
)
def test_names_have_no_prefix_of_a_wrapper(name):
    assert without_wrappers(name) == "layer.0"
