"""Blocks as small integers: against the reference, the error bound, and what is not finite."""

from __future__ import annotations

import pytest
import torch

from lightning_zero.ops import dequantize_blocks, quantize_blocks
from lightning_zero.ops.quantize import (
    dequantize_blocks_reference_,
    packed_numel,
    quantize_blocks_reference_,
)

FORMATS = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.usefixtures("native")
both_widths = pytest.mark.parametrize("bits", [8, 4])


def reference(values, bits, block_numel, dtype=torch.float32):
    """Integers, scales and read values of the reference."""
    numel = values.numel()
    kind = torch.int8 if bits == 8 else torch.uint8
    packed = torch.zeros(packed_numel(numel, bits), dtype=kind)
    scales = torch.zeros(-(-numel // block_numel))
    read = torch.zeros(numel, dtype=dtype)
    quantize_blocks_reference_(values, bits, block_numel, packed, scales)
    dequantize_blocks_reference_(packed, scales, bits, block_numel, read)
    return packed, scales, read


@both_widths
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(("numel", "block_numel"), [(1, 2), (7, 4), (1000, 64), (8193, 8192)])
def test_integers_and_scales_are_those_of_the_reference(numel, block_numel, dtype, bits):
    torch.manual_seed(numel)
    values = (torch.randn(numel) * torch.logspace(-3, 3, numel)).to(dtype)
    expected = reference(values, bits, block_numel, dtype)
    packed, scales = quantize_blocks(values, bits, block_numel)
    read = dequantize_blocks(packed, scales, bits, block_numel, numel=numel, dtype=dtype)
    for found, wanted in zip((packed, scales, read), expected, strict=True):
        assert torch.equal(found, wanted)


@both_widths
def test_error_is_half_a_step_of_the_block(bits):
    torch.manual_seed(0)
    values = torch.randn(40, 100)
    packed, scales = quantize_blocks(values, bits, 100)
    read = dequantize_blocks(packed, scales, bits, 100, numel=4000).view(40, 100)
    steps = values.abs().amax(1, keepdim=True) / (127 if bits == 8 else 7)
    assert ((read - values).abs() <= steps * 0.5001).all()
    torch.testing.assert_close(scales[:, None], steps, rtol=1e-6, atol=0)


@both_widths
def test_integers_of_a_scale_of_one_are_read_exactly(bits):
    largest = 127 if bits == 8 else 7
    values = torch.arange(-largest, largest + 1).float()
    packed, scales = quantize_blocks(values, bits, 256)
    assert scales.tolist() == [1.0]
    assert torch.equal(dequantize_blocks(packed, scales, bits, 256, numel=len(values)), values)


@both_widths
def test_zeros_and_what_is_next_to_them_are_zeros(bits):
    values = torch.cat([torch.zeros(8), torch.full((8,), 1e-40), torch.full((8,), 2.0**-119)])
    packed, scales = quantize_blocks(values, bits, 8)
    assert not packed.any()
    assert not scales.any()


@both_widths
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_block_with_a_value_that_is_not_finite_is_not_read_as_finite(bad, bits):
    values = torch.ones(24)
    values[13] = bad
    expected = reference(values, bits, 8)
    packed, scales = quantize_blocks(values, bits, 8)
    read = dequantize_blocks(packed, scales, bits, 8, numel=24)
    assert not read[8:16].isfinite().any()
    assert torch.equal(read[:8], torch.ones(8))
    assert torch.equal(read[16:], torch.ones(8))
    assert torch.equal(packed, expected[0])


@both_widths
def test_threads_do_not_change_integers(bits):
    torch.manual_seed(0)
    values = torch.randn(300_001)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = quantize_blocks(values, bits, 1024)
        torch.set_num_threads(3)
        assert all(map(torch.equal, quantize_blocks(values, bits, 1024), alone))
        read = dequantize_blocks(*alone, bits, 1024, numel=300_001)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(read, reference(values, bits, 1024)[2])


def test_nothing_is_quantised_to_nothing():
    packed, scales = quantize_blocks(torch.zeros(0), 4, 8)
    assert packed.numel() == scales.numel() == 0
    assert dequantize_blocks(packed, scales, 4, 8, numel=0).numel() == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(8), 6, 8), "bits=6: must be 8 or 4"),
        ((torch.zeros(8), 8, 7), "block_numel=7: must be even"),
        ((torch.zeros(8).double(), 8, 8), "torch.float64: must be"),
        ((torch.zeros(16)[::2], 8, 8), "have gaps"),
    ],
)
def test_what_cannot_be_quantised_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantize_blocks(*arguments)


def test_integers_of_another_numel_are_refused():
    packed, scales = quantize_blocks(torch.ones(9), 4, 4)
    with pytest.raises(ValueError, match=r"packed is torch.uint8 \(5,\): 11 elements of 4 bits"):
        dequantize_blocks(packed, scales, 4, 4, numel=11)
    with pytest.raises(ValueError, match="need torch.int8"):
        dequantize_blocks(packed, scales, 8, 4, numel=5)


def test_ops_pass_the_checks_of_torch():
    ops = torch.ops.lightning_zero
    values, packed, scales = torch.randn(9), torch.zeros(5, dtype=torch.uint8), torch.zeros(3)
    torch.library.opcheck(ops.quantize_blocks_.default, (values, 4, 4, packed, scales))
    torch.library.opcheck(ops.dequantize_blocks_.default, (packed, scales, 4, 4, values))
