"""Products of linear_cross_entropy as other devices compute them.

On a GPU they are padded to sizes that cuBLAS multiplies fast. On processors with AVX512-BF16 that
are not Intel's, those of bfloat16 are ours. Any CPU takes these ways if the environment variable
AMPFUSE_VARIANT says so. It is read once, so the programs below run in processes of their own.
"""

import json
import os
from pathlib import Path

import pytest
import warm

BEGIN = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
import torch
from linear_reference import WAYS, check, head, with_options
"""

# One more than a multiple of 8, one less, and one of the two sizes as it should be.
RESULTS = """
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
    for classes, features in ((97, 24), (103, 23), (96, 25), (5, 3)):
        for name in ("plain", "smooth probabilities", "all"):
            batch = head(torch.device("cpu"), dtype, classes=classes, features=features)
            batch, options = with_options(batch, name)
            for how in WAYS.values():
                check(batch, **how, **options)
            check(batch, chunk_classes=12, **options)
            check(batch, **options)
"""

IGNORED = """
for how in ({}, {"chunk_rows": 4}, {"chunk_classes": 8}):
    for logits_dtype in (torch.bfloat16, torch.float32):
        if how.get("chunk_classes") and logits_dtype != torch.float32:
            continue
        batch = head(torch.device("cpu"), torch.bfloat16, classes=97, features=23)
        with torch.no_grad():
            batch.hidden[3] = torch.inf  # the target of row 3 is ignored
        loss = batch.loss(logits_dtype=logits_dtype, **how)
        of_hidden, *_ = batch.grads(loss)
        assert loss.isfinite()
        assert of_hidden[3].eq(0).all()
        assert of_hidden.isfinite().all()
"""

# Prints sizes and strides of the matrices that torch multiplies.
OPERANDS = """
from torch.profiler import ProfilerActivity, profile

classes, features, how = json.loads(sys.argv[1])
batch = head(torch.device("cpu"), torch.float32, classes=classes, features=features)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as seen:
    batch.grads(batch.loss(**how))
events = list(seen.profiler.kineto_results.experimental_event_tree())
for event in events:
    events += event.children
    if event.name in ("aten::mm", "aten::addmm"):
        inputs = [each for each in event.typed[1].inputs if hasattr(each, "strides")]
        print(json.dumps([[each.sizes, each.strides] for each in inputs if len(each.sizes) == 2]))
"""


# Rows, features and classes: each is the summed dimension of one product. Panels have 8 rows or 48
# columns, blocks 1024 summed elements, and 8192 of them are packed at a time. With (24, 40, 60) two
# threads have 2 and 1 of 3 panels.
OWN_PRODUCTS = """
torch.set_num_threads(2)
for sizes in (1, 1, 1), (24, 40, 60), (9, 33, 130), (50, 1031, 97), (130, 24, 49), (3, 17, 8203):
    batch = head(torch.device("cpu"), torch.bfloat16, *sizes)
    for how in ({}, {"chunk_rows": 4}):
        check(batch, **how)
"""


def run(program, *arguments, variant="padded_products"):
    command = [warm.python(), "-c", BEGIN + program, *arguments]
    env = os.environ | {"AMPFUSE_VARIANT": f"other,{variant}"}
    done = warm.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_of_padded_products_are_exact():
    run(RESULTS)


@pytest.mark.skipif(
    "avx512_bf16" not in Path("/proc/cpuinfo").read_text(), reason="there is no AVX512-BF16"
)
def test_results_of_our_own_bfloat16_products_are_exact():
    run(OWN_PRODUCTS, variant="own_product")


def test_infinite_hidden_states_of_an_ignored_row_do_not_spoil_padded_gradients():
    run(IGNORED)


@pytest.mark.parametrize("how", [{}, {"chunk_rows": 8}, {"chunk_classes": 37}], ids=str)
@pytest.mark.parametrize(("classes", "features"), [(97, 24), (96, 23), (103, 31)])
def test_every_product_takes_multiples_of_8(classes, features, how):
    lines = run(OPERANDS, json.dumps([classes, features, how])).splitlines()
    # The logits and two gradients. Rows may have any number: they are never contiguous.
    assert len(lines) >= 3
    for line in lines:
        for sizes, strides in json.loads(line):
            contiguous = strides.index(1)
            assert sizes[contiguous] % 8 == 0, line
            assert strides[1 - contiguous] % 8 == 0, line
