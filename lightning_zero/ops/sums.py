"""Sums of squares: of everything, as for a norm, and by columns, as a measure of importance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_zero.ops.dense import FLOATS, flat_memory, is_dense
from lightning_zero.ops.libraries import is_native


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Add up the squares of all elements of all tensors, reading each once.

    The sum is not finite exactly if an element is not: one number tells the norm and whether there
    was an overflow. Squares are exact and added in double, in an order that does not depend on the
    number of threads.

    Args:
        tensors: fp32, bf16 or fp16, mixed as they come, of one device.

    Returns:
        0-d, fp64, on their device; zero on the host for no tensors.

    Raises:
        ValueError: A tensor has another dtype or device.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float64)
    device = tensors[0].device
    for i, tensor in enumerate(tensors):
        if tensor.dtype not in FLOATS or tensor.device != device:
            raise ValueError(
                f"tensors[{i}] is {tensor.dtype} on {tensor.device}: must be one of "
                f"{', '.join(map(str, FLOATS))}, and on {device} as the first one is"
            )
    dense = [flat_memory(t if is_dense(t) else t.contiguous()) for t in tensors]
    total = dense[0].new_zeros((), dtype=torch.float64)
    if is_native(device):
        torch.ops.lightning_zero.sum_of_squares_(dense, total)
    else:
        sum_of_squares_reference_(dense, total)
    return total


@torch.no_grad()
def column_importance(gradient: Tensor) -> Tensor:
    """Sum of the squares of each column of a gradient.

    Args:
        gradient: [rows, columns], fp32, bf16 or fp16.

    Returns:
        fp32 [columns], added up in double.

    Raises:
        ValueError: The gradient is no matrix of these dtypes.

    Source:
        ZenFlow (arXiv:2505.12242) section 3.
    """
    check_matrix("gradient", gradient)
    sums = gradient.new_zeros(gradient.shape[1], dtype=torch.float32)
    if is_native(gradient.device):
        torch.ops.lightning_zero.column_squares_(gradient.contiguous(), sums)
    else:
        column_squares_reference_(gradient, sums)
    return sums


def sum_of_squares_reference_(tensors: Sequence[Tensor], total: Tensor) -> None:
    """Fill the sum in plain PyTorch, without a copy of the tensors in double."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    total.copy_(torch.stack(norms).square().sum())


def column_squares_reference_(matrix: Tensor, sums: Tensor) -> None:
    """Fill the sums in plain PyTorch."""
    sums.copy_(torch.linalg.vector_norm(matrix, dim=0, dtype=torch.float64).square())


def check_matrix(name: str, tensor: Tensor) -> None:
    """Refuse what is no matrix of fp32, bf16 or fp16.

    Raises:
        ValueError: Names the tensor, its shape and dtype.
    """
    if tensor.dim() != 2 or tensor.dtype not in FLOATS:
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}: must have two axes, and be one of "
            f"{', '.join(map(str, FLOATS))}"
        )


@torch.no_grad()
def column_words(words: Tensor, columns: int) -> Tensor:
    """Add up integers by columns: word i goes to sum ``i % columns``. Overflow wraps around.

    Args:
        words: int64, 1-D, contiguous.
        columns: How many sums.

    Returns:
        int64 [columns], on the device of the words.
    """
    sums = words.new_zeros(columns)
    if words.device.type == "cpu" and is_native(words.device):
        torch.ops.lightning_zero.column_words_(words, sums)
        return sums
    whole = len(words) // columns * columns
    sums += words[:whole].view(-1, columns).sum(0)
    sums[: len(words) - whole] += words[whole:]
    return sums
