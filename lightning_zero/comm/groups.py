"""Process groups of the engine.

Every room gets a group of its own, so that its transfers never interleave with Lightning's own
calls, with torchmetrics or with user code on the default group, nor with those of another room.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_zero.comm.api import Collectives
from lightning_zero.comm.collectives import choose_collectives


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """Collectives over all ranks that share the model states, one set per room."""

    gradients: Collectives
    """Reductions of gradients, and small agreements about them."""

    parameters: Collectives
    """Gathers and publishes of parameters."""

    control: Collectives
    """Start-up, buffers and checkpoints."""

    @classmethod
    def create(cls, timeout: timedelta | None = None) -> ShardGroups:
        """Make the groups over all ranks of the default group; to be called on all ranks.

        Args:
            timeout: Longest wait for the other ranks in any transfer; None for the default group's.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls(*(choose_collectives(None) for _ in range(3)))
        return cls(*(choose_collectives(dist.new_group(timeout=timeout)) for _ in range(3)))

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
        return self.gradients.sent_nbytes + self.parameters.sent_nbytes
