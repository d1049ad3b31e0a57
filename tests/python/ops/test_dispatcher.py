"""Every op under torch.ops.ampfuse: its kernels, its tag, and torch's own checks of both.

A new op needs an entry in OPCHECK_SAMPLES, or in separate samples if it takes no lists of tensors.
A test fails if the entry is missing.
"""

import pytest
import scale_reference
import torch
from adam_reference import OPTIONS
from cross_entropy_samples import CROSS_ENTROPY_SAMPLES
from linear_samples import LINEAR_KEYWORDS, LINEAR_SAMPLES
from op_overloads import looks, overload
from reference import REAL, heavy_tailed, scalar
from sgd_reference import SETTINGS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

SGD_OPTIONS = SETTINGS[-1]  # with momentum
LAYOUTS = {
    "contiguous": lambda x: x,
    "strided": lambda x: x[:, ::2],
    "empty": lambda x: x[:0],
}


def tensors(dtype, device, layout):
    return [LAYOUTS[layout](heavy_tailed((5, 7), dtype, device, seed=seed)) for seed in (0, 1)]


def unscaling(device):
    return scalar(0.0, device), scalar(0.5, device)


# The positional arguments with which torch.library.opcheck calls each op.
OPCHECK_SAMPLES = {
    "multi_tensor_norm": lambda tensors, device: (tensors, 2.0),
    "multi_tensor_unscale": lambda tensors, device: (tensors, *unscaling(device)),
    "multi_tensor_unscale_norm": lambda tensors, device: (tensors, *unscaling(device), 1.0),
    "multi_tensor_clip": lambda tensors, device: (tensors, scalar(5.0, device), 1.0),
    "fused_adam": lambda tensors, device: adam_columns(tensors),
    "fused_adam.write_back_grads": lambda tensors, device: adam_columns(tensors),
    "fused_sgd": lambda tensors, device: sgd_columns(tensors),
    "fused_sgd.write_back_grads": lambda tensors, device: sgd_columns(tensors),
    "update_scale": lambda tensors, device: (
        scalar(8.0, device),
        torch.zeros((), dtype=torch.int32, device=device),
        torch.tensor([1, 0, 0], device=device),
        [scalar(0.0, device), scalar(1.0, device)],
    ),
}
# Made of torch's operators; test_coded_moment.py calls opcheck.
CONVERSIONS = ("decode_moment", "encode_moment")
# The arguments of losses. Their tests of opcheck are in tests/python/losses.
LOSS_SAMPLES = CROSS_ENTROPY_SAMPLES | LINEAR_SAMPLES


def adam_columns(tensors):
    moments = [
        [torch.ones_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in tensors]
        for _ in range(2)
    ]
    steps = [torch.ones((), device=x.device) for x in tensors]
    return tensors, [x.clone() for x in tensors], *moments, [], steps, []


def sgd_columns(tensors):
    params, grads, buffers, _, _, steps, masters = adam_columns(tensors)
    return params, grads, buffers, steps, masters


def keywords(op, device):
    """Return the keyword-only arguments of an op."""
    if op.startswith("fused_adam"):
        return OPTIONS | {"lr": scalar(1e-3, device)}
    if op.startswith("fused_sgd"):
        return SGD_OPTIONS | {"lr": scalar(1e-3, device)}
    return scale_reference.OPTIONS if op == "update_scale" else {}


def sample_of(op, dtype, device, layout):
    """Return the positional arguments of an op or of a loss, and the keyword-only ones."""
    if op in LOSS_SAMPLES:
        return LOSS_SAMPLES[op](dtype, device, 4), LINEAR_KEYWORDS.get(op, {})
    return OPCHECK_SAMPLES[op](tensors(dtype, device, layout), device), keywords(op, device)


def registered_ops():
    prefix = "ampfuse::"
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def has_kernel(op, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"ampfuse::{op}", key)


# A composite op calls other ops and uses their kernels.
EVERY_OP = pytest.mark.parametrize(
    "op", [op for op in registered_ops() if not has_kernel(op, "CompositeImplicitAutograd")]
)
EVERY_CHECKED_OP = pytest.mark.parametrize("op", OPCHECK_SAMPLES)


@EVERY_OP
def test_every_op_has_kernels(op):
    assert [has_kernel(op, key) for key in ("CPU", "Meta", "Autograd")] == [True] * 3


@EVERY_OP
def test_every_op_answers_on_cuda_with_a_kernel_or_an_error_of_ours(op):
    assert has_kernel(op, "CUDA")


@pytest.mark.parametrize("op", registered_ops())
def test_ops_are_tagged_compliant_exactly_if_opcheck_covers_them(op):
    is_covered = op in {*OPCHECK_SAMPLES, *LOSS_SAMPLES, *CONVERSIONS}
    # Tracing refuses an op that overwrites its argument and has a gradient.
    assert (torch.Tag.pt2_compliant_tag in overload(op).tags) == is_covered


@EVERY_OP
def test_only_mutating_ops_have_a_kernel_that_counts_versions(op):
    assert has_kernel(op, "ADInplaceOrView") == overload(op)._schema.is_mutable


@EVERY_OP
def test_no_op_returns_an_alias_of_an_argument(op):
    assert all(result.alias_info is None for result in overload(op)._schema.returns)


# Every layout, and 16-bit tensors, whose results have another dtype. A scale has neither.
LOOKS = [(torch.float32, layout) for layout in LAYOUTS] + [(torch.bfloat16, "strided")]
CHECKS = [(op, *look) for op in OPCHECK_SAMPLES for look in LOOKS if op != "update_scale"]


@pytest.mark.parametrize(("op", "dtype", "layout"), [*CHECKS, ("update_scale", *LOOKS[0])])
def test_opcheck_passes_for_every_sampled_op(device, op, dtype, layout):
    torch.library.opcheck(overload(op), *sample_of(op, dtype, device, layout))


def test_opcheck_passes_for_the_norm_of_tensors_that_require_grad(device):
    parameters = [x.requires_grad_() for x in tensors(torch.float32, device, "contiguous")]

    # The fourth utility is left out: it runs a backward pass, which this op does not have.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(overload("multi_tensor_norm"), (parameters,), test_utils=utilities)


@EVERY_CHECKED_OP
def test_opcheck_passes_for_an_empty_list(op):
    utilities = ["test_schema", "test_autograd_registration"]
    # Without any tensor, torch's fake mode cannot find the device; the other ops have scalars.
    # ampfuse.get_total_norm handles an empty list itself.
    if op != "multi_tensor_norm":
        utilities += ["test_faketensor", "test_aot_dispatch_dynamic"]
    cpu = torch.device("cpu")

    torch.library.opcheck(
        overload(op), OPCHECK_SAMPLES[op]([], cpu), keywords(op, cpu), test_utils=utilities
    )


@pytest.mark.parametrize(
    ("op", "layout"),
    [(op, layout) for op in OPCHECK_SAMPLES for layout in LAYOUTS]
    + [(op, "contiguous") for op in LOSS_SAMPLES],
)
def test_fake_results_have_the_metadata_of_real_ones(device, op, layout):
    has_complex_kernel = op in OPCHECK_SAMPLES and not op.startswith("fused_")
    for dtype in [*REAL, torch.complex64] if has_complex_kernel else REAL:
        sample = sample_of(op, dtype, device, layout)
        with FakeTensorMode() as mode:
            arguments, options = tree_map_only(torch.Tensor, mode.from_tensor, sample)
            fake = overload(op)(*arguments, **options)

        real = overload(op)(*sample[0], **sample[1])

        assert looks(fake) == looks(real), dtype


@EVERY_CHECKED_OP
def test_results_of_meta_tensors_are_on_the_meta_device(op):
    meta = torch.device("meta")
    sample = OPCHECK_SAMPLES[op]([torch.empty(3, device=meta)], meta)

    results = overload(op)(*sample, **keywords(op, meta))

    assert all(result.device == meta for result in results or ())
