"""`apply_to_model`: no tensor has the size of all logits, in forward or backward."""

import pytest
import torch
from causal_models import pair_of, step
from harness.memory import extra_peak
from torch.utils._python_dispatch import TorchDispatchMode

CLASSES, ROWS, LENGTH = 32000, 4, 256
LOGITS = ROWS * LENGTH * CLASSES
WEIGHT = CLASSES * 16


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements among the results of operators."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **kwargs or {})
        for tensor in torch.utils._pytree.tree_iter(results):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return results


def models():
    return pair_of(vocab_size=CLASSES, max_position_embeddings=LENGTH, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def inputs():
    tokens = torch.randint(1, CLASSES, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "labels": tokens}


def test_no_operator_returns_a_tensor_of_the_size_of_the_logits(inputs):
    largest = []
    for model in models():
        with LargestTensor() as mode:
            step(model, **inputs)
        largest.append(mode.elements)
    assert largest[0] >= LOGITS
    # The largest tensors are attention's, of the length's square, and the weight's gradient.
    assert largest[1] <= max(WEIGHT, ROWS * 2 * LENGTH * LENGTH) < LOGITS / 8


def test_step_allocates_a_fraction_of_the_logits(inputs):
    def peak(model):
        step(model, **inputs)  # allocates the gradients
        return extra_peak(torch.device("cpu"), lambda: model(**inputs).loss.backward())

    theirs, ours = (peak(model) for model in models())
    assert theirs >= 2 * 4 * LOGITS
    # A CPU takes 64 MiB of float32 logits at a time.
    assert ours <= 2**26 + 16 * WEIGHT < 4 * LOGITS
