"""Where shard gradients live, and how reductions get there.

[Note: gradients on the host]
Where the optimizer is offloaded, shard gradients live in host memory. A reduction ends in a buffer
of the device, from where it leaves at once, while backward goes on; to a gradient that is there
already it is added by the host. What they are to be multiplied with to clip them is done with the
step, which passes over them anyway, and is lost with it where the step uses a copy in another
dtype: without offload that copy alone would have been multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_zero.memory.link import HostLink, Transfer
from lightning_zero.memory.pool import BufferPool
from lightning_zero.plan.layout import BucketLayout

Memory = Callable[[int, torch.dtype], Tensor]
"""Gives 1-D memory of so many elements."""


class Reduced(Protocol):
    """A bucket of gradients, as its home sees it."""

    layout: BucketLayout
    buffer: Tensor | None
    """1-D [N], collected gradients."""
    wire_dtype: torch.dtype
    shard_dtype: torch.dtype

    @property
    def shard_grad(self) -> Tensor:
        """1-D [S]."""

    def piece_grad(self, slot: int) -> Tensor:
        """This rank's piece of it, a view."""

    def note_sum_spread(self) -> None:
        """A sum over the ranks is in the gradient."""


class Landing(NamedTuple):
    """Where a reduction ends."""

    out: Tensor
    """1-D [S], on the device."""

    accumulate: bool
    """The reduction adds to what is in ``out``."""

    is_borrowed: bool = False
    """``out`` is a buffer from the pool."""

    joins: bool = False
    """What has landed is to be added to the gradient on the host."""


class Arrivals:
    """Is told of a gradient in host memory; this one does nothing with it."""

    def on_arrived(self) -> None:
        """All that the latest backward has for the gradient is in it."""

    def before_change(self) -> None:
        """It is about to be written to, or is lost: whoever reads it has to be done with it."""


class DeviceHome:
    """Gradients stay on the device; reductions end in them.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D memory."""
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def landing(self, bucket: Reduced, accumulate: bool, pool: BufferPool) -> Landing:
        """Where the next reduction is to end.

        Args:
            bucket: The bucket.
            accumulate: There is a gradient to add to.
            pool: Buffers of the device.
        """
        return Landing(bucket.shard_grad, accumulate)

    def take(self, bucket: Reduced, landing: Landing) -> Transfer | None:
        """A reduction has ended; what it has left on the device is brought to its place.

        Returns:
            The way of it to the host, if it leaves: the buffer is free when it has ended.
        """
        bucket.note_sum_spread()
        return None

    def settle(self, bucket: Reduced) -> None:
        """Wait until all that was reduced is in the gradient."""

    def look(self, bucket: Reduced) -> bool:
        """Take in what has arrived; does not wait.

        Returns:
            Whether all that was reduced is in the gradient.
        """
        return True

    def drop(self) -> None:
        """Forget what is under way, after an error."""

    def before_accumulation(self, bucket: Reduced, kept: set[int]) -> None:
        """More is about to be added to the gradients of these slots; others begin anew."""


class HostHome(DeviceHome):
    """Gradients live in host memory, see [Note: gradients on the host].

    Args:
        link: The way there.
        keeps_factors: What has been multiplied stays so after a step; else it is done to a copy.
        memory: Gives the memory of the gradient; None for the link's.
    """

    def __init__(self, link: HostLink, keeps_factors: bool, memory: Memory | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._link = link
        self._memory = memory or link.zeros
        self.arrivals = Arrivals()
        """Who is told when a gradient is there."""
        self._keeps_factors = keeps_factors
        self._leaving: list[tuple[Transfer, Tensor | None]] = []
        self.factors: dict[int, Tensor] = {}
        """Slots whose gradient is still to be multiplied, by a 0-d fp32 each."""

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the base class."""
        return self._memory(numel, dtype)

    def landing(self, bucket: Reduced, accumulate: bool, pool: BufferPool) -> Landing:
        """See the base class."""
        buffer = bucket.buffer
        if bucket.layout.world_size == 1 and buffer is not None:  # nothing is summed: it leaves
            return Landing(buffer, accumulate=False, joins=accumulate)
        dtype = bucket.wire_dtype if accumulate else bucket.shard_dtype
        out = pool.take(bucket.layout.shard_numel, dtype)
        return Landing(out, accumulate=False, is_borrowed=True, joins=accumulate)

    def take(self, bucket: Reduced, landing: Landing) -> Transfer | None:
        """See the base class."""
        staging = None
        if landing.joins:
            staging = self._link.zeros(landing.out.numel(), landing.out.dtype)
        target = bucket.shard_grad if staging is None else staging
        transfer = self._link.to_host(landing.out, target)
        self._leaving.append((transfer, staging))
        return transfer

    def settle(self, bucket: Reduced) -> None:
        """See the base class."""
        if not self._leaving:
            return
        for transfer, staging in self._leaving:
            transfer.wait_on_host()
            if staging is not None:
                bucket.shard_grad.add_(staging)
            bucket.note_sum_spread()
        self._leaving.clear()
        self.arrivals.on_arrived()

    def look(self, bucket: Reduced) -> bool:
        """See the base class."""
        if any(not transfer.is_done() for transfer, _ in self._leaving):
            return False
        self.settle(bucket)
        return True

    def drop(self) -> None:
        """See the base class."""
        self.arrivals.before_change()
        self._leaving.clear()
        self.factors.clear()

    def before_accumulation(self, bucket: Reduced, kept: set[int]) -> None:
        """See the base class."""
        self.arrivals.before_change()
        self.end_step()
        self.factors = {slot: f for slot, f in self.factors.items() if slot in kept}
        self.apply_factors(bucket)

    def scale_later(self, slot: int, factor: Tensor) -> None:
        """Multiply a gradient when it is used next.

        Args:
            slot: Of a piece of this rank, which is not to be multiplied yet.
            factor: 0-d fp32.
        """
        self.factors[slot] = factor.to("cpu")

    def end_step(self) -> None:
        """Forget what was to be done to a copy, which is gone."""
        if not self._keeps_factors:
            self.factors.clear()

    def apply_factors(self, bucket: Reduced) -> None:
        """Multiply what was to be multiplied later."""
        for slot, factor in self.factors.items():
            bucket.piece_grad(slot).mul_(factor)
        self.factors.clear()
