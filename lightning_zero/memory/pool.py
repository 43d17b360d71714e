"""Buffers that are used again within one backward."""

from __future__ import annotations

import torch
from torch import Tensor


class BufferPool:
    """Flat tensors of one device, kept by dtype and size until ``clear``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[torch.dtype, int], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor with arbitrary content."""
        free = self._free.get((dtype, numel))
        return free.pop() if free else torch.empty(numel, dtype=dtype, device=self._device)

    def give(self, buffer: Tensor) -> None:
        """Take a tensor back that nobody reads or writes any more."""
        self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)

    def clear(self) -> None:
        """Free all that was given back."""
        self._free.clear()
