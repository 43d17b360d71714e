"""Tensors as runs of memory, in which the order of axes does not matter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def flat_memory(tensor: Tensor) -> Tensor:
    """A dense tensor's elements as they lie in memory, 1-D; shares it, and has no graph."""
    detached = tensor.detach()
    return detached.as_strided((detached.numel(),), (1,), detached.storage_offset())


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor lie in one run of memory, without gaps or overlaps."""
    if tensor.is_contiguous():
        return True
    axes = sorted((stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, numel in axes:
        if numel != 1:
            if stride != expected:
                return False
            expected *= numel
    return True


def check_pieces(lists: dict[str, Sequence[Tensor]]) -> None:
    """Refuse lists whose tensors are not, one by one, the same run of memory of the same device.

    Args:
        lists: By name, the first one is what the others are held against.

    Raises:
        ValueError: A list has another length; a tensor another device, numel or order in memory, or
            it has gaps.
    """
    (first_name, first), *others = lists.items()
    device = first[0].device if first else None
    for name, tensors in lists.items():
        if len(tensors) != len(first):
            raise ValueError(
                f"{name} has {len(tensors)} tensors and {first_name} has {len(first)}: "
                "one of each belongs to a piece"
            )
        for i, tensor in enumerate(tensors):
            if tensor.device != device:
                raise ValueError(
                    f"{name}[{i}] is on {tensor.device} and {first_name}[0] on {device}: "
                    "step the pieces of each device by a call of their own"
                )
            if not is_dense(tensor):
                raise ValueError(
                    f"{name}[{i}] has gaps or overlaps (shape {tuple(tensor.shape)}, strides "
                    f"{tensor.stride()}): pass a tensor that fills its memory, such as a clone"
                )
    for name, tensors in others:
        for i, (tensor, reference) in enumerate(zip(tensors, first, strict=True)):
            if tensor.numel() != reference.numel() or not _is_same_order(tensor, reference):
                raise ValueError(
                    f"{name}[{i}] (shape {tuple(tensor.shape)}, strides {tensor.stride()}) does "
                    f"not lie in memory as {first_name}[{i}] does (shape {tuple(reference.shape)}, "
                    f"strides {reference.stride()}): bring it into that order"
                )


def check_dtype(name: str, tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Refuse a list of tensors that have not one and the same of these dtypes.

    Raises:
        ValueError: Names the tensor and its dtype.
    """
    for i, tensor in enumerate(tensors):
        if tensor.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise ValueError(f"{name}[{i}] is {tensor.dtype}: must be {wanted}")
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(
                f"{name}[{i}] is {tensor.dtype} and {name}[0] {tensors[0].dtype}: step the pieces "
                "of each dtype by a call of their own"
            )


def bump_versions(*lists: Sequence[Tensor]) -> None:
    """Tell autograd that tensors were changed, as an in-place op of torch does."""
    changed = [tensor for tensors in lists for tensor in tensors if not tensor.is_inference()]
    if changed:
        torch.autograd.graph.increment_version(changed)


def _is_same_order(tensor: Tensor, other: Tensor) -> bool:
    """Whether elements of two tensors lie alike; one that is seen flat lies as its owner says."""
    if tensor.shape != other.shape or tensor.stride() == other.stride():
        return True
    axes = zip(tensor.shape, tensor.stride(), other.stride(), strict=True)
    return all(n == 1 or stride == other_stride for n, stride, other_stride in axes)
