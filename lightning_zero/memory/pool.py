"""Buffers that are used again within one backward."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Flat tensors of one device, kept until ``clear``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of ``numel`` elements with arbitrary content, maybe part of a larger one."""
        fitting = [b for b in self._free if b.dtype == dtype and b.numel() >= numel]
        if not fitting:
            return torch.empty(numel, dtype=dtype, device=self._device)
        smallest = min(fitting, key=Tensor.numel)
        self._free = [buffer for buffer in self._free if buffer is not smallest]
        return smallest if smallest.numel() == numel else smallest[:numel]

    def give(self, buffer: Tensor) -> None:
        """Take a tensor back that nobody reads or writes any more."""
        self._free.append(buffer if buffer._base is None else buffer._base)

    def clear(self) -> None:
        """Free all that was given back."""
        self._free.clear()
