"""Weighs the tensors of a process."""

from __future__ import annotations

import gc

import torch


def alive_nbytes() -> int:
    """Bytes of all tensors that Python can reach, each storage once."""
    found = {}
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), torch.Tensor):
            continue
        for tensor in (candidate, candidate.grad if candidate.is_leaf else None):
            if tensor is not None:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
