"""Process groups of the engine.

Every room gets a group of its own, so that its transfers never interleave with Lightning's own
calls, with torchmetrics or with user code on the default group, nor with those of another room.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from lightning_zero.comm.api import Collectives
from lightning_zero.comm.collectives import choose_collectives
from lightning_zero.comm.reads import CollectiveReads, OwnReads, ShardReads, make_reads

DEFAULT_TIMEOUT = timedelta(minutes=30)
ProcessGroup = dist.ProcessGroup


class ShardGroups:
    """Collectives over all ranks that share the model states, one set per room.

    Args:
        gradients: Reductions of gradients, and small agreements about them.
        parameters: Gathers and publishes of parameters.
        control: Start-up, buffers and checkpoints.
        timeout: Longest wait for the other ranks in any transfer.
    """

    def __init__(
        self,
        gradients: Collectives,
        parameters: Collectives,
        control: Collectives,
        timeout: timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.gradients = gradients
        self.parameters = parameters
        self.control = control
        self._timeout = timeout
        self._reads: ShardReads | None = None
        self._background: ProcessGroup | None = None

    @classmethod
    def create(cls, timeout: timedelta | None = None) -> ShardGroups:
        """Make the groups over all ranks of the default group; to be called on all ranks.

        Args:
            timeout: Longest wait for the other ranks in any transfer; None for the default group's,
                and half an hour where threads wait.
        """
        waits = timeout or DEFAULT_TIMEOUT
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            one = choose_collectives(None)
            return cls(one, one, one, waits)
        first, second, third = (dist.new_group(timeout=timeout) for _ in range(3))
        return cls(
            choose_collectives(first), choose_collectives(second), choose_collectives(third), waits
        )

    def reads(self, gather_by: str = "auto") -> ShardReads:
        """How sharded parameters come together; to be called on all ranks.

        Args:
            gather_by: ``"one_sided"``, ``"collective"``, or ``"auto"`` for one-sided reads where
                transfers go through host memory anyway.
        """
        if self.world_size == 1:
            return OwnReads()
        if gather_by == "collective" or (gather_by == "auto" and not self.parameters.is_host_side):
            return CollectiveReads(self.parameters, self.control)
        if self._reads is None:
            self._reads = make_reads(self._timeout)
        return self._reads

    def background(self) -> ProcessGroup | None:
        """A host-side group for a thread; None for one rank. To be called on all ranks."""
        if self.world_size == 1:
            return None
        if self._background is None:
            self._background = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._background

    @property
    def rank(self) -> int:
        """This rank."""
        return self.gradients.rank

    @property
    def world_size(self) -> int:
        """Ranks that share the model states (W)."""
        return self.gradients.world_size

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent for gradients and parameters."""
        read = 0 if self._reads is None else self._reads.sent_nbytes
        return self.gradients.sent_nbytes + self.parameters.sent_nbytes + read
