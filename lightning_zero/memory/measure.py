"""Bytes of model states that are alive on this rank."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from lightning_zero.plan.memory import ModelStateBytes

__all__ = ["ModelStateBytes", "storage_nbytes"]


def storage_nbytes(tensors: Iterable[Tensor], others: Iterable[Tensor] = ()) -> int:
    """Bytes of the memory behind tensors, each storage counted once.

    Args:
        tensors: What is counted.
        others: Whose memory is not counted here.
    """
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    for tensor in others:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(found.values())
