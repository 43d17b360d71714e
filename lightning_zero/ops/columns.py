"""Selected columns of a matrix, packed and put back."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_zero.ops.dense import bump_versions
from lightning_zero.ops.libraries import is_native
from lightning_zero.ops.sums import check_matrix


@torch.no_grad()
def gather_columns(matrix: Tensor, indices: Tensor) -> Tensor:
    """Copy columns of a matrix into a packed one.

    Args:
        matrix: [rows, columns], fp32, bf16 or fp16.
        indices: Of k columns, int64 [k], on the device of the matrix.

    Returns:
        [rows, k], contiguous, of the matrix's dtype.

    Raises:
        ValueError: Matrix or indices have another shape, dtype or device.
        IndexError: There is no such column (of a matrix on a device: an error of the device).
    """
    _check(matrix, indices)
    packed = matrix.new_empty(matrix.shape[0], len(indices))
    if is_native(matrix.device):
        torch.ops.lightning_zero.gather_columns_(matrix.contiguous(), indices, packed)
    else:
        gather_columns_reference_(matrix, indices, packed)
    return packed


@torch.no_grad()
def scatter_columns_(matrix: Tensor, indices: Tensor, packed: Tensor) -> None:
    """Write packed columns to their places in a matrix.

    Args:
        matrix: [rows, columns], contiguous; changed.
        indices: Of k columns, int64 [k], each at most once.
        packed: [rows, k], of the matrix's dtype and device.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit each other; the matrix has gaps.
        IndexError: As `gather_columns`.
    """
    _check(matrix, indices)
    wanted = (matrix.shape[0], len(indices))
    if tuple(packed.shape) != wanted or packed.dtype != matrix.dtype:
        raise ValueError(
            f"packed is {packed.dtype} {tuple(packed.shape)}: must be {matrix.dtype} {wanted}"
        )
    if packed.device != matrix.device:
        raise ValueError(f"packed is on {packed.device} and the matrix on {matrix.device}")
    if not matrix.is_contiguous():
        raise ValueError(f"the matrix has strides {matrix.stride()}: must be contiguous")
    if is_native(matrix.device):
        torch.ops.lightning_zero.scatter_columns_(matrix, indices, packed.contiguous())
        bump_versions([matrix])
    else:
        scatter_columns_reference_(matrix, indices, packed)


def gather_columns_reference_(matrix: Tensor, indices: Tensor, packed: Tensor) -> None:
    """Fill packed columns in plain PyTorch."""
    torch.index_select(matrix, 1, indices, out=packed)


def scatter_columns_reference_(matrix: Tensor, indices: Tensor, packed: Tensor) -> None:
    """Write packed columns in plain PyTorch."""
    matrix.index_copy_(1, indices, packed)


def _check(matrix: Tensor, indices: Tensor) -> None:
    check_matrix("matrix", matrix)
    if indices.dim() != 1 or indices.dtype != torch.int64 or indices.device != matrix.device:
        raise ValueError(
            f"indices are {indices.dtype} {tuple(indices.shape)} on {indices.device}: must be "
            f"int64, with one axis, on {matrix.device}"
        )
