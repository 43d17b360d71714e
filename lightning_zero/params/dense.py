"""The dense memory order of a parameter, such as channels last, which flat tensors keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.ops import column_words

FINGERPRINT_CHUNK_NUMEL = 2**16
STAMP_COLUMNS = 1021
"""A prime, so that rows of a matrix that change places change columns here."""
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Strides of a dense copy of a tensor that keeps its memory order."""
    dense = torch.empty_like(
        tensor, device="meta", memory_format=torch.preserve_format, requires_grad=False
    )
    return tuple(dense.stride())


def flatten(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """A tensor in the order of dense strides, 1-D; a view of it where it has these strides."""
    if tensor.stride() == tuple(stride):
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    dense = torch.empty_strided(
        tensor.shape, tuple(stride), dtype=tensor.dtype, device=tensor.device
    )
    return dense.copy_(tensor.detach()).as_strided((tensor.numel(),), (1,))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two 1-D tensors of one dtype are equal to the last bit, NaN included."""
    kind = _INTEGER[a.element_size()]
    return torch.equal(a.view(kind), b.view(kind))


def fingerprint(flat: Tensor) -> int:
    """A number that changes with any element of a 1-D tensor, and with the order of elements."""
    begin_nbytes = flat.storage_offset() * flat.element_size()
    has_words = flat.nbytes % 4 == 0 and begin_nbytes % 4 == 0
    words = flat.view(torch.int32 if has_words else _INTEGER[flat.element_size()])
    places = torch.arange(1, FINGERPRINT_CHUNK_NUMEL + 1, device=flat.device)
    factors = places * -7046029254386353131  # odd, so no word is lost in the product
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in torch.split(words, FINGERPRINT_CHUNK_NUMEL):
        total = total * 31 + (chunk * factors[: len(chunk)]).sum()
    return int(total)


def stamp(flat: Tensor) -> Tensor:
    """As :func:`fingerprint` in one pass, and without waiting for a device.

    Moves of whole blocks by a multiple of the columns that it sums are not seen.

    Args:
        flat: 1-D of any real dtype.

    Returns:
        0-d int64 on the device of ``flat``.
    """
    words, rests = _words(flat)
    sums = column_words(words, STAMP_COLUMNS)
    places = torch.arange(1, STAMP_COLUMNS + 1, device=flat.device)
    total = (sums * (places * -7046029254386353131)).sum()
    for rest in rests:
        total = total * 31 + rest.sum()
    return total


def checksum(flat: Tensor) -> int:
    """A number that tells tensors of other bits apart, without memory for a copy.

    Args:
        flat: 1-D of any real dtype.
    """
    words, rests = _words(flat)
    total = words.sum()
    for rest in rests:
        total = total + rest.sum()
    return int(total)


def _words(flat: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Bits as int64 words, and what lies before and after them, as integers of its own width."""
    in_word = 8 // flat.element_size()
    first = min(flat.numel(), -flat.storage_offset() % in_word)
    last = first + (flat.numel() - first) // in_word * in_word
    kind = _INTEGER[flat.element_size()]
    rests = flat[:first].view(kind), flat[last:].view(kind)
    return flat[first:last].view(torch.int64), rests
