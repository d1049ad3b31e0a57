"""Moments in 8 bits: conversions to codes and back."""

import pytest
import torch
from ampfuse.ops import decode_moment, encode_moment
from reference import same_bits

EVERY_SIGN = pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "unsigned"])


def codes_and_units(is_signed, count, device, seed=0):
    """Return random codes and units, as steps store them: each group has one of the largest."""
    generator = torch.Generator().manual_seed(seed)
    low, most = (-127, 127) if is_signed else (0, 255)
    codes = torch.randint(low, most + 1, (count,), generator=generator)
    codes[::32] = most - torch.randint(0, 3, codes[::32].shape, generator=generator)
    units = 10 ** (torch.rand(codes[::32].shape, generator=generator) * 30 - 15)
    dtype = torch.int8 if is_signed else torch.uint8
    return codes.to(device, dtype), units.to(device, torch.bfloat16)


@EVERY_SIGN
def test_a_code_stands_for_the_square_of_its_multiple_of_the_unit(device, is_signed):
    codes, units = codes_and_units(is_signed, 1000, device)
    roots = codes.double() * units.double().repeat_interleave(32)[:1000]
    expected = roots * roots.abs()

    torch.testing.assert_close(
        decode_moment(codes, units).double(), expected, rtol=2**-24, atol=1e-45
    )


@EVERY_SIGN
def test_decoded_moments_get_their_codes_again(device, is_signed):
    # Each code occurs with many units. A group of one element may have other codes for its value.
    for seed in range(20):
        codes, units = codes_and_units(is_signed, 2048, device, seed)
        again = encode_moment(decode_moment(codes, units), is_signed=is_signed)

        assert torch.equal(again.codes, codes)
        assert same_bits(again.units, units)


@EVERY_SIGN
def test_numbers_are_rounded_to_the_nearest_code(device, is_signed):
    most = 127 if is_signed else 255
    moment = torch.randn(4096, device=device, dtype=torch.float64)
    moment = moment if is_signed else moment.square()

    codes, units = encode_moment(moment, is_signed=is_signed)

    of_each = units.double().repeat_interleave(32)
    roots = moment.sign() * moment.abs().sqrt()
    least = 0 if is_signed else (codes == 1).double()  # a small one is not rounded to 0
    assert ((codes.double() * of_each - roots).abs() <= (0.5001 + 0.5 * least) * of_each).all()
    largest = codes.view(-1, 32).to(torch.int32).abs().amax(1)
    assert (largest >= most - 2).all()


def test_a_positive_second_moment_gets_a_code_above_0(device):
    moment = torch.tensor([1.0, 1e-12, 0.0], device=device)

    codes, units = encode_moment(moment, is_signed=False)

    assert codes[0] >= 253
    assert codes[1:].tolist() == [1, 0]
    assert decode_moment(codes, units)[1] > 1e-12


@EVERY_SIGN
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (33,), (5, 7)])
def test_codes_have_the_shape_and_the_order_of_the_moment(device, is_signed, shape):
    moment = torch.rand(shape, device=device)
    coded = encode_moment(moment, is_signed=is_signed)

    assert coded.codes.shape == moment.shape
    assert coded.units.shape == ((moment.numel() + 31) // 32,)
    assert decode_moment(*coded).shape == moment.shape


def test_groups_follow_the_memory(device):
    moment = torch.rand(4, 8, 3, 3, device=device).to(memory_format=torch.channels_last)
    in_order = moment.permute(0, 2, 3, 1).contiguous()

    coded = encode_moment(moment, is_signed=True)
    expected = encode_moment(in_order, is_signed=True)

    assert coded.codes.stride() == moment.stride()
    assert torch.equal(coded.codes.permute(0, 2, 3, 1), expected.codes)
    assert same_bits(coded.units, expected.units)
    assert torch.equal(decode_moment(*coded).permute(0, 2, 3, 1), decode_moment(*expected))


def test_a_tensor_with_gaps_is_taken_in_the_order_of_its_indices(device):
    for gaps in (
        torch.rand(64, 2, device=device)[:, 0],
        torch.rand(8, 16, device=device)[:, ::2].t(),
    ):
        coded = encode_moment(gaps, is_signed=True)
        expected = encode_moment(gaps.contiguous(), is_signed=True)

        assert coded.codes.is_contiguous()
        assert torch.equal(coded.codes, expected.codes)
        assert same_bits(coded.units, expected.units)


def test_a_nan_or_an_infinity_makes_its_group_nan_and_no_other(device):
    for value in (torch.nan, torch.inf):
        moment = torch.ones(96, device=device)
        moment[40] = value
        decoded = decode_moment(*encode_moment(moment, is_signed=True))

        assert decoded[32:64].isnan().all()
        assert (decoded[:32] == decoded[0]).all()
        assert decoded[64:].isfinite().all()


def test_tiny_and_huge_moments_keep_their_size(device):
    for size in (1e-38, 1e-30, 1e30, 3e38):
        moment = torch.full((32,), size, device=device)
        decoded = decode_moment(*encode_moment(moment, is_signed=False))
        torch.testing.assert_close(decoded, moment, rtol=0.02, atol=0)


def test_wrong_arguments_are_refused(device):
    codes, units = codes_and_units(True, 64, device)
    with pytest.raises(TypeError, match="encode_moment: moment: expected floating-point numbers"):
        encode_moment(codes, is_signed=True)
    with pytest.raises(TypeError, match="codes: expected int8 or uint8, got float32"):
        decode_moment(codes.float(), units)
    with pytest.raises(ValueError, match=r"units: expected shape \[2\], one number for each 32"):
        decode_moment(codes, units[:1])


def encoded_twice(moment):
    return decode_moment(*encode_moment(moment, is_signed=True))


def test_conversions_pass_opcheck_and_are_traced(device):
    moment = torch.randn(5, 7, device=device)
    coded = encode_moment(moment, is_signed=True)
    torch.library.opcheck(torch.ops.ampfuse.encode_moment, (moment,), {"is_signed": True})
    torch.library.opcheck(torch.ops.ampfuse.decode_moment, tuple(coded))

    compiled = torch.compile(encoded_twice, fullgraph=True, backend="aot_eager")

    assert torch.equal(compiled(moment), encoded_twice(moment))
