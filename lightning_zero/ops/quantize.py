"""Blocks of values as small integers with one scale each."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.ops.dense import FLOATS, check_dtype, flat_memory, is_dense
from lightning_zero.ops.libraries import is_native

LARGEST_INTEGER = {8: 127.0, 4: 7.0}
SMALLEST_MAGNITUDE = 2.0**-118


def quantize_blocks(values: Tensor, bits: int, block_numel: int) -> tuple[Tensor, Tensor]:
    """Round values to integers of their block's scale, symmetric around zero.

    A block's largest magnitude becomes the largest integer, 127 or 7. A block without a magnitude
    of at least 2^-118 becomes zeros. One with a value that is not finite is read back as no finite
    value at all, so that nothing wrong looks right.

    Args:
        values: fp32, bf16 or fp16, any shape, without gaps; N elements as they lie in memory.
        bits: Of an integer, 8 or 4.
        block_numel: Elements of a block, even; the last block may be shorter.

    Returns:
        Integers and scales, both 1-D on the device of the values: int8 [N], or uint8 [ceil(N / 2)]
        with the first of two integers in the lower half; fp32 [ceil(N / block_numel)], what one
        step of a block's integers stands for.

    Raises:
        ValueError: Wrong dtype, bits or block_numel; the values have gaps.

    Source:
        ZeRO++ (arXiv:2306.10209) section 3.1.
    """
    _check(bits, block_numel)
    check_dtype("values", [values], FLOATS)
    if not is_dense(values):
        raise ValueError(
            f"values have gaps or overlaps (shape {tuple(values.shape)}, strides "
            f"{values.stride()}): pass a contiguous tensor"
        )
    flat = flat_memory(values)
    packed = flat.new_empty(
        packed_numel(flat.numel(), bits), dtype=torch.int8 if bits == 8 else torch.uint8
    )
    scales = flat.new_empty(-(-flat.numel() // block_numel), dtype=torch.float32)
    if is_native(flat.device):
        torch.ops.lightning_zero.quantize_blocks_(flat, bits, block_numel, packed, scales)
    else:
        quantize_blocks_reference_(flat, bits, block_numel, packed, scales)
    return packed, scales


def dequantize_blocks(
    packed: Tensor,
    scales: Tensor,
    bits: int,
    block_numel: int,
    *,
    numel: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Values of what `quantize_blocks` has returned: integer times scale in fp32, then rounded.

    Args:
        packed: Integers, as `quantize_blocks` returns them.
        scales: fp32 [ceil(numel / block_numel)].
        bits: As they were quantised.
        block_numel: Likewise.
        numel: Elements N that were quantised.
        dtype: Of the result, fp32, bf16 or fp16.

    Returns:
        1-D [N], on the device of the integers.

    Raises:
        ValueError: Integers or scales are not those of so many elements, or of another dtype.
    """
    _check(bits, block_numel)
    expected = {"packed": packed_numel(numel, bits), "scales": -(-numel // block_numel)}
    dtypes = {"packed": torch.int8 if bits == 8 else torch.uint8, "scales": torch.float32}
    for name, tensor in (("packed", packed), ("scales", scales)):
        if tensor.shape != (expected[name],) or tensor.dtype != dtypes[name]:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}: {numel} elements of {bits} bits "
                f"in blocks of {block_numel} need {dtypes[name]} [{expected[name]}]"
            )
    values = packed.new_empty(numel, dtype=dtype)
    check_dtype("values", [values], FLOATS)
    packed, scales = packed.contiguous(), scales.contiguous()
    if is_native(packed.device):
        torch.ops.lightning_zero.dequantize_blocks_(packed, scales, bits, block_numel, values)
    else:
        dequantize_blocks_reference_(packed, scales, bits, block_numel, values)
    return values


def packed_numel(numel: int, bits: int) -> int:
    """Elements of the packed integers of so many values; each is one byte."""
    return numel if bits == 8 else (numel + 1) // 2


def quantize_blocks_reference_(
    values: Tensor, bits: int, block_numel: int, packed: Tensor, scales: Tensor
) -> None:
    """Fill integers and scales in plain PyTorch; see `quantize_blocks`."""
    if not values.numel():
        return
    blocks = _padded(values.float(), block_numel)
    largest = blocks.abs().amax(1)
    largest = torch.where(largest < SMALLEST_MAGNITUDE, 0.0, largest)
    scales.copy_(largest / LARGEST_INTEGER[bits])
    inverses = torch.where(largest == 0.0, 0.0, LARGEST_INTEGER[bits] / largest)
    integers = (blocks * inverses[:, None]).round()
    integers[~largest.isfinite()] = 1.0
    flat = integers.flatten()[: values.numel()].to(torch.int8)
    if bits == 8:
        packed.copy_(flat)
        return
    pairs = torch.nn.functional.pad(flat, (0, values.numel() % 2)).view(-1, 2)
    packed.copy_(((pairs[:, 0] & 15) | ((pairs[:, 1] & 15) << 4)).view(torch.uint8))


def dequantize_blocks_reference_(
    packed: Tensor, scales: Tensor, bits: int, block_numel: int, values: Tensor
) -> None:
    """Fill values in plain PyTorch; see `dequantize_blocks`."""
    if not values.numel():
        return
    integers = packed
    if bits == 4:
        halves = torch.stack([packed & 15, packed >> 4], dim=1).flatten()[: values.numel()]
        integers = (halves.to(torch.int8) ^ 8) - 8
    blocks = _padded(integers.float(), block_numel) * scales[:, None]
    values.copy_(blocks.flatten()[: values.numel()])


def _padded(flat: Tensor, block_numel: int) -> Tensor:
    """Rows of whole blocks, the last one filled with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block_numel)).view(-1, block_numel)


def _check(bits: int, block_numel: int) -> None:
    if bits not in LARGEST_INTEGER:
        raise ValueError(f"bits={bits}: must be 8 or 4")
    if block_numel < 2 or block_numel % 2:
        raise ValueError(f"block_numel={block_numel}: must be even and at least 2")
