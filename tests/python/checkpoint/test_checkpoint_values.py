"""Values of all kinds come back from a checkpoint as they were."""

import json
import math
from collections import Counter, OrderedDict

import ampfuse.checkpoint as checkpoint
import numpy as np
import pytest
import torch
from ampfuse.checkpoint._tree import DTYPES
from checkpointed import same
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn


def there_and_back(folder, value):
    checkpoint.save(folder, step=0, values=value, rng=False)
    return checkpoint.load(folder).values


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float16, torch.device("cpu"), torch.device("cuda", 1)]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.sampled_from(["$tensor", "$dict"]), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(PLAIN)
@example([math.inf, -math.inf, -0.0, math.nan])  # JSON lacks these numbers
def test_plain_values_come_back_with_their_types(tmp_path, value):
    assert repr(there_and_back(tmp_path, value)) == repr(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_all_kinds_come_back(tmp_path, dtype):
    saved = []
    for shape in ((), (0, 3), (5,), (2, 3)):
        tensor = torch.randint(0, 100, (*shape, 16), dtype=torch.uint8)
        tensor = tensor.view(dtype)[..., 0] if dtype != torch.bool else tensor[..., 0] > 50
        saved += [tensor, tensor.movedim(-1, 0) if shape else tensor]
    found = there_and_back(tmp_path, saved)
    assert [one.shape for one in found] == [one.shape for one in saved]
    assert same(found, saved)


def test_parts_of_one_tensor_come_back_as_tensors_of_their_own(tmp_path):
    whole = torch.arange(10.0)
    found = there_and_back(tmp_path, {"whole": whole, "part": whole[2:5], "again": whole})
    assert torch.equal(found["part"], whole[2:5])
    assert found["part"].untyped_storage().nbytes() == 12
    assert torch.equal(found["again"], whole)


def test_values_of_numpy_come_back(tmp_path):
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    found = there_and_back(tmp_path, {"array": array, "number": np.float32(0.5), "int": np.int8(3)})
    assert isinstance(found["array"], np.ndarray)
    assert found["array"].dtype == np.uint32
    assert (found["array"] == array).all()
    assert (found["number"], found["int"]) == (0.5, 3)


def test_dicts_of_all_kinds_come_back(tmp_path):
    one, two, three = (torch.tensor(float(number)) for number in (1, 2, 3))
    # Places that have one name stay distinct.
    for value in ({"a/b": one, "a": {"b": two}, "a/b~": three}, {1: one, "1": two}):
        assert repr(there_and_back(tmp_path, value)) == repr(value)
    counter = Counter({10: 1, 20: 2})
    assert repr(there_and_back(tmp_path, counter)) == repr(counter)
    # Ordered dicts keep their order and become dicts.
    assert list(there_and_back(tmp_path, OrderedDict([("b", 1), ("a", 2)]))) == ["b", "a"]


def test_conjugated_and_negated_tensors_come_back(tmp_path):
    tensor = torch.tensor([1 + 2j])
    found = there_and_back(tmp_path, [tensor, tensor.conj(), tensor.conj().imag])
    assert [one.tolist() for one in found] == [[1 + 2j], [1 - 2j], [-2.0]]


def test_strides_of_dense_tensors_come_back(tmp_path):
    tensor = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found = there_and_back(tmp_path, tensor)
    assert found.stride() == tensor.stride()
    assert torch.equal(found, tensor)


def test_files_can_be_read_without_ampfuse(tmp_path):
    model = nn.Linear(3, 2)
    path = checkpoint.save(tmp_path, step=7, model=model, values={"epoch": 2}).path
    index = json.loads((path / "checkpoint.json").read_text())
    assert (index["step"], index["parts"]["values"]) == (7, {"epoch": 2})
    entry = index["tensors"]["model/state/weight"]
    assert (entry["dtype"], entry["shape"]) == ("torch.float32", [2, 3])
    assert torch.equal(load_file(path / entry["file"])["model/state/weight"], model.weight)


@pytest.mark.parametrize(
    "value", [np.longdouble(1), np.array([1.0], ">f4"), np.add], ids=["long", "order", "ufunc"]
)
def test_values_of_numpy_that_torch_lacks_are_refused_with_their_place(tmp_path, value):
    with pytest.raises(TypeError, match="save: values/a"):
        there_and_back(tmp_path, {"a": value})
