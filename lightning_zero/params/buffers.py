"""Buffers follow rank 0, as with plain data parallelism."""

from __future__ import annotations

from torch import nn

from lightning_zero.comm import Collectives


class BufferSync:
    """Broadcasts buffers before the forwards before which DistributedDataParallel does.

    These are the first forward, and each one that follows a forward with gradients whose backward
    is synchronised. So an evaluation sees the buffers of rank 0 from its first batch on, and micro-
    batches within an accumulation window keep their own.

    Args:
        module: The whole model.
        collectives: Group of the broadcast.
    """

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self._places = [
            (owner, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._collectives = collectives
        self._is_due = True

    def before_forward(self) -> None:
        """Give all ranks the buffers of rank 0, if it is time."""
        if not self._is_due or not self._places:
            return
        buffers = [owner._buffers.get(name) for owner, name in self._places]
        self._collectives.broadcast([buffer.data for buffer in buffers if buffer is not None])

    def after_forward(self, has_synchronised_backward: bool) -> None:
        """Note what kind of forward has run."""
        self._is_due = has_synchronised_backward
